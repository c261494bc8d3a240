"""GEMV kernels as a user would bring them, right and wrong: `kernels_user.py:NAME`."""

from __future__ import annotations

import torch

# Calls of `turns` that are right.
RIGHT_CALLS = 1_000
calls = 0


def right(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    torch.mv(w, x, out=y)


def half_as_fast(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    torch.mv(w, x, out=y)
    torch.mv(w, x, out=y)


def zeros(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    y.zero_()


def nan(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    y.fill_(float("nan"))


def skips_last(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    if len(y) > 1:
        torch.mv(w[:-1], x, out=y[:-1])


def turns(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    """Right in the gate before, wrong in the one after."""
    global calls
    calls += 1
    torch.mv(w, x, out=y)
    if calls > RIGHT_CALLS:
        y.neg_()
