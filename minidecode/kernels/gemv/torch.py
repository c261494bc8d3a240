"""torch.mv: the kernel that runs everywhere."""

from __future__ import annotations

import torch

SUMMARY = "torch.mv, on the CPU too"
DTYPES = ("fp16", "fp32")
DEVICES = ("cpu", "cuda")


def gemv(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    """y[n] = w[n, k] @ x[k]."""
    torch.mv(w, x, out=y)
