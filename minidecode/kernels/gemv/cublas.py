"""The vendor library, as PyTorch calls it: the baseline that every kernel is compared with."""

from __future__ import annotations

import torch

SUMMARY = "cuBLAS through torch.mm"
DTYPES = ("fp16", "fp32")
DEVICES = ("cuda",)


def gemv(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    """y[n] = w[n, k] @ x[k], written in place."""
    torch.mm(x.unsqueeze(0), w.t(), out=y.unsqueeze(0))
