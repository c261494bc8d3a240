"""What a GEMV is: its contract, its FP64 reference, the bytes it moves, the error measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidecode.errors import MinidecodeError

if TYPE_CHECKING:
    import torch

DTYPES: tuple[str, ...] = ("fp16", "fp32")
BYTES: dict[str, int] = {"fp16": 2, "fp32": 4}

# Elements of a matrix above which its FP64 product would take a CPU seconds; 128 MB in FP64.
LARGE = 1 << 24


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
    """w[n, k] @ x[k] in FP64, shape [n], on the CPU."""
    return gemv_reference_and_scale(w, x)[0]


def gemv_reference_and_scale(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w[n, k] @ x[k] and √Σⱼ (w[i, j]·x[j])², both in FP64, of shape [n] and on the CPU.

    The second is how large a row's result is by chance. A row's error is judged against it, since
    the result itself may happen to be next to nothing. Worked out on the CPU, matrices of more than
    LARGE elements on their own device; a slab of rows at a time bounds the memory.
    """
    import torch

    n, k = w.shape
    place = w.device if w.numel() > LARGE else torch.device("cpu")
    x64 = x.detach().to(place, torch.float64)
    result = torch.empty(n, dtype=torch.float64)
    scale = torch.empty(n, dtype=torch.float64)
    rows = max(1, LARGE // max(1, k))
    for start in range(0, n, rows):
        slab = w[start : start + rows].detach().to(place, torch.float64)
        result[start : start + rows] = slab @ x64
        scale[start : start + rows] = slab.square_() @ x64.square()
    return result, scale.sqrt_()


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
