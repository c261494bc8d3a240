"""Batch-one LLM decoding with swappable CUDA GEMV kernels, and the measurements that go with it."""

__version__ = "0.1.0"
