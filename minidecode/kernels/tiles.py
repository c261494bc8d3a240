"""Tiles of the fused linear kernels: which one a layer gets, measured or by rule."""

from __future__ import annotations

from dataclasses import dataclass

# Shared memory that a block may use for weights on sm_90 (227 KB less what the kernel has itself).
STAGED_BYTES = 224 * 1024


@dataclass(frozen=True)
class Tile:
    """How a block of a fused linear kernel works; the fields are those of `fused_linear.cuh`.

    threads of a block; rows held in registers, each with `unroll` 16-byte loads a thread in
    flight; rows `staged` in shared memory by bulk copies (sm_90 only); blocks that must be able to
    be `resident` on a multiprocessor.
    """

    threads: int
    rows: int
    unroll: int = 1
    staged: int = 0
    resident: int = 1

    @property
    def spelled(self) -> str:
        """The C++ type."""
        fields = (self.threads, self.rows, self.unroll, self.staged, self.resident)
        return f"Tile<{','.join(map(str, fields))}>"

    def fits(self, k: int, clusters: bool) -> bool:
        """Whether the tile runs for rows of k elements; `clusters` is sm_90 or later."""
        return not self.staged or (clusters and self.staged * k * 2 <= STAGED_BYTES)


def default_tile(n: int, k: int) -> Tile:
    """A sensible tile where nothing was measured: 4 rows for small layers, 8 for large ones."""
    pieces = k // 8
    threads = 128 if pieces <= 256 else 256 if pieces <= 1024 else 512
    return Tile(threads, 8 if n * k >= 2**23 else 4)
