"""Batch-one LLM decoding with swappable CUDA GEMV kernels, and the measurements that go with it.

    decoder = minidecode.load("example")
    for token in decoder.generate(prompt_ids, max_new_tokens=40): ...

Importing the package compiles nothing and touches no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidecode.decode import Decoder, GenerationStats
    from minidecode.loading import load
    from minidecode.sampling import Sampling

__version__ = "0.1.0"
__all__ = ["Decoder", "GenerationStats", "Sampling", "__version__", "load"]

_HOME = {
    "Decoder": "minidecode.decode",
    "GenerationStats": "minidecode.decode",
    "Sampling": "minidecode.sampling",
    "load": "minidecode.loading",
}


def __getattr__(name: str) -> Any:
    # On first use, since torch takes seconds to import and `--help` should not.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
