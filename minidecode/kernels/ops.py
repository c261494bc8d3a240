"""What a GEMV is: its contract, its FP64 reference, the bytes it moves, the error measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidecode.errors import MinidecodeError

if TYPE_CHECKING:
    import torch

DTYPES: tuple[str, ...] = ("fp16", "fp32")
BYTES: dict[str, int] = {"fp16": 2, "fp32": 4}


class NotSupportedError(MinidecodeError):
    """A kernel says that it does not handle this shape; it has enqueued nothing."""


def torch_dtype(dtype: str) -> torch.dtype:
    """ "fp16" or "fp32" as torch spells it."""
    import torch

    return {"fp16": torch.float16, "fp32": torch.float32}[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float16 -> "fp16"; another dtype's own name if no kernel takes it."""
    import torch

    return {torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))


def gemv_bytes(n: int, k: int, dtype: str = "fp16") -> int:
    """Bytes that y[n] = w[n, k] @ x[k] has to move at least: w and x read once, y written once."""
    return (n * k + k + n) * BYTES[dtype]


def gemv_reference(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """w[n, k] @ x[k] in FP64 on the CPU, shape [n]. A slab of rows at a time bounds the memory."""
    return _slabs(w, x, squared=False)


def gemv_row_scale(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """√Σⱼ (w[i, j]·x[j])² in FP64 on the CPU, shape [n]: how large a row's result is by chance.

    A row's error is judged against this, since its own result may happen to be next to nothing.
    """
    return _slabs(w, x, squared=True).sqrt()


def _slabs(w: torch.Tensor, x: torch.Tensor, *, squared: bool) -> torch.Tensor:
    import torch

    n, k = w.shape
    x64 = x.detach().cpu().double()
    if squared:
        x64 = x64.square()
    rows = max(1, (1 << 24) // max(1, k))
    out = torch.empty(n, dtype=torch.float64)
    for start in range(0, n, rows):
        slab = w[start : start + rows].detach().cpu().double()
        out[start : start + rows] = (slab.square_() if squared else slab) @ x64
    return out


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in FP64; ‖out‖ itself where the reference is all zeros.

    Any NaN or infinity in `out` makes it infinite, so that a comparison with a limit fails.
    """
    import torch

    difference = out.detach().cpu().double() - reference
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    scale = float(reference.norm())
    error = float(difference.norm())
    return error / scale if scale > 0 else error
