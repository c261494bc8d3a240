"""Kernels: contracts, registry, build and check. Importing this compiles nothing."""
