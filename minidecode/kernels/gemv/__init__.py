"""GEMV kernels in Python, one a file; the registry finds them by their file names."""
