"""A Triton GEMV: one program does a block of rows; each chunk of x it loads serves them all."""

import torch

from minidecode.errors import MissingError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

SUMMARY = "Triton, a block of rows a program, FP32 accumulation"
DTYPES = ("fp16", "fp32")
DEVICES = ("cuda",)

WARPS = 4
# Elements of w that a program has in flight: 16 a thread is two 16-byte loads of FP16.
TILE = 2 * 1024
# Fewer programs than this leave multiprocessors idle, so small matrices get fewer rows a program.
PROGRAMS = 512


def unavailable() -> str | None:
    """Triton is an optional part of PyTorch, absent from CPU builds."""
    return None if triton is not None else "triton is not installed: pip install triton"


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _rows(y, w, x, n, k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
        """y[n] = w[n, k] @ x[k] for the rows of one program."""
        row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tl.arange(0, BLOCK_K)
        inside = row < n
        # Products of row and k pass 2^31 in the largest heads.
        start = w + row.to(tl.int64)[:, None] * k + column[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        for done in range(0, k, BLOCK_K):
            left = column < k - done
            part = tl.load(x + done + column, mask=left, other=0.0).to(tl.float32)
            tile = tl.load(start + done, mask=inside[:, None] & left[None, :], other=0.0)
            total += tile.to(tl.float32) * part[None, :]
        tl.store(y + row, tl.sum(total, axis=1).to(y.dtype.element_ty), mask=inside)


def gemv(y: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> None:
    """y[n] = w[n, k] @ x[k]; the first call for a tile and alignment compiles."""
    if triton is None:
        raise MissingError("triton is not installed: pip install triton")
    n, k = w.shape
    rows = 8
    while rows > 1 and n < rows * PROGRAMS:
        rows //= 2
    columns = min(TILE // rows, max(32, triton.next_power_of_2(k)))
    _rows[(triton.cdiv(n, rows),)](y, w, x, n, k, BLOCK_M=rows, BLOCK_K=columns, num_warps=WARPS)
