"""torch.compile's matrix product: what the compiler makes of a GEMV, autotuned for each shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from minidecode.errors import MinidecodeError

SUMMARY = "torch.compile (inductor), autotuned for each shape"
DTYPES = ("fp16", "fp32")
DEVICES = ("cuda",)

# What torch calls mode "max-autotune-no-cudagraphs".
OPTIONS: dict[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}

# A model has a handful of shapes and `gemv` tables a few dozen; each is a compilation of its own.
MAX_SHAPES = 256


def unavailable() -> str | None:
    """Inductor makes its GPU kernels with Triton."""
    return (
        None if find_spec("triton") is not None else "triton is not installed: pip install triton"
    )


def gemv(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    """y[n] = w[n, k] @ x[k]; the first call for a shape compiles."""
    try:
        _compiled()(y, w, x)
    except MinidecodeError:
        raise
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise MinidecodeError(
            f"torch.compile could not build a GEMV for n={w.shape[0]}, k={w.shape[1]}: {words[0]}"
        ) from error


@functools.lru_cache(maxsize=1)
def _compiled() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_SHAPES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * MAX_SHAPES)
    compiled: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = torch.compile(
        _matvec, options=OPTIONS, dynamic=False
    )
    return compiled


def _matvec(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    y.copy_(torch.mm(w, x.unsqueeze(1)).squeeze(1))
