"""The tests on the host shim notice broken kernels: each mutant here must be caught.

A mutant changes one place of one file. A place that is no longer there fails the test, so the list
keeps up with the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gemv_cases
import needs
import pytest
import shim
from gemv_cases import Case

pytestmark = needs.present(shim.unavailable())


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in `where`, a file below cuda/ that the kernel is made of."""

    kernel: str
    name: str
    old: str
    new: str
    where: str = ""
    dtype: str = "fp16"

    @property
    def source(self) -> Path:
        return shim.CUDA / "gemv" / f"{self.kernel}.cu"

    @property
    def file(self) -> Path:
        return shim.CUDA / self.where if self.where else self.source

    def build(self) -> Path:
        text = self.file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} x {self.old!r}"
        return shim.build_library(
            self.source, overlay={self.file: text.replace(self.old, self.new)}
        )


REDUCE = "include/minidecode/reduce.cuh"
WARP_SUM = "for (int offset = kWarp / 2; offset > 0; offset >>= 1) {\n    v += "
STAGE_DROPPED = "for (int offset = kWarp / 4; offset > 0; offset >>= 1) {\n    v += "
LAST_STAGE_DROPPED = "for (int offset = kWarp / 2; offset > 1; offset >>= 1) {\n    v += "

MUTANTS = [
    Mutant("naive", "row-guard", "if (row >= n) return;", ""),
    Mutant("naive", "k-tail", "col < k; ++col", "col < k - 1; ++col"),
    Mutant("naive", "sum-overwritten", "sum += ", "sum = "),
    Mutant("column_atomic", "k-tail", "col < k; col +=", "col + kThreads <= k; col +="),
    Mutant("column_atomic", "row-guard", "if (threadIdx.x < rows) y[", "y["),
    Mutant(
        "column_atomic",
        "rows-guard",
        "min(static_cast<size_t>(kRows), n - first_row)",
        "static_cast<size_t>(kRows)",
    ),
    Mutant(
        "column_atomic",
        "first-barrier",
        "sums[threadIdx.x] = 0.0f;\n  __syncthreads();",
        "sums[threadIdx.x] = 0.0f;",
    ),
    Mutant("column_atomic", "last-barrier", "  }\n  __syncthreads();\n", "  }\n"),
    Mutant("column_atomic", "no-zeros", "sums[threadIdx.x] = 0.0f", "(void)sums"),
    Mutant("column_atomic", "column-guard", "if (col >= k) return;", "", dtype="fp32"),
    Mutant(
        "column_atomic",
        "no-memset",
        "cudaMemsetAsync(y, 0, sizeof(float) * n, stream)",
        "cudaSuccess",
        dtype="fp32",
    ),
    Mutant(
        "column_atomic",
        "default-stream",
        "cudaMemsetAsync(y, 0, sizeof(float) * n, stream)",
        "cudaMemsetAsync(y, 0, sizeof(float) * n, 0)",
        dtype="fp32",
    ),
    Mutant("column_atomic", "row-tail", "row < n; ++row", "row < n - 1; ++row", dtype="fp32"),
    Mutant("shared_tree", "k-tail", "col < k; col +=", "col + kThreads <= k; col +="),
    Mutant(
        "shared_tree",
        "first-barrier",
        "sums[thread] = sum;\n  __syncthreads();",
        "sums[thread] = sum;",
    ),
    Mutant("shared_tree", "tree-barrier", "    __syncthreads();\n", ""),
    Mutant(
        "shared_tree", "first-stage", "kThreads / 2; half_width > 0", "kThreads / 4; half_width > 0"
    ),
    Mutant("shared_tree", "last-stage", "half_width > 0", "half_width > 1"),
    Mutant(
        "shared_tree",
        "divergent-barrier",
        "if (thread < half_width) sums",
        "if (thread >= half_width) break;\n    sums",
    ),
    Mutant("warp_row", "row-guard", "if (row >= n) return;", ""),
    Mutant("warp_row", "k-tail", "col < k; col +=", "col + minidecode::kWarp <= k; col +="),
    Mutant("warp_row", "first-stage", WARP_SUM, STAGE_DROPPED, where=REDUCE),
    Mutant("warp_row", "last-stage", WARP_SUM, LAST_STAGE_DROPPED, where=REDUCE),
    Mutant(
        "warp_row",
        "every-lane-leaves",
        "if (row >= n) return;",
        "if (row >= n || lane >= k) return;",
    ),
    Mutant("half2_block", "pair-tail", "i < k / 2;", "i + kThreads <= k / 2;"),
    Mutant("half2_block", "odd-tail", "i < k;", "i < k - 1;"),
    Mutant("half2_block", "first-stage", WARP_SUM, STAGE_DROPPED, where=REDUCE),
    Mutant("half2_block", "last-stage", WARP_SUM, LAST_STAGE_DROPPED, where=REDUCE),
    Mutant(
        "half2_block",
        "barrier",
        "scratch[warp] = v;\n  __syncthreads();",
        "scratch[warp] = v;",
        where=REDUCE,
    ),
    Mutant(
        "half2_block",
        "lane-guard",
        "lane < kWarps ? scratch[lane] : 0.0f",
        "scratch[lane]",
        where=REDUCE,
    ),
    Mutant("half2_block", "w-alignment", "minidecode::rows_aligned(w, k, sizeof(half2)) &&", ""),
    Mutant(
        "half2_block",
        "x-alignment",
        "&&\n                     minidecode::rows_aligned(x, k, sizeof(half2))",
        "",
    ),
    Mutant(
        "half2_block",
        "wrong-row",
        "w + size_t{blockIdx.x} * k",
        "w + size_t{blockIdx.x} * (k / 2 * 2)",
    ),
]

CASES = [
    Case(n, k, w_offset=w_offset, x_offset=x_offset, order=order, dependent=order < 2)
    for (n, k), (w_offset, x_offset), order in itertools.product(
        [(5, 64), (33, 257), (1, 1), (3, 1056), (3, 1057)], [(0, 0), (1, 0), (0, 1)], range(4)
    )
]


def first_fault(library: shim.Runner, dtype: str) -> str | None:
    return next(filter(None, (gemv_cases.wrong(library, dtype, case) for case in CASES)), None)


@pytest.fixture(scope="module")
def built() -> Iterator[Callable[[Mutant], Path]]:
    with ThreadPoolExecutor(2) as pool:
        futures: dict[Mutant, Future[Path]] = {m: pool.submit(m.build) for m in MUTANTS}
        yield lambda mutant: futures[mutant].result()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.kernel}-{m.dtype}-{m.name}")
def test_mutant_is_caught(mutant: Mutant, built: Callable[[Mutant], Path]) -> None:
    with shim.Runner(built(mutant)) as library:
        assert first_fault(library, mutant.dtype) is not None


@pytest.mark.parametrize(
    ("kernel", "dtype"), sorted({(mutant.kernel, mutant.dtype) for mutant in MUTANTS})
)
def test_kernel_as_it_is_passes(kernel: str, dtype: str) -> None:
    with shim.host_library(shim.CUDA / "gemv" / f"{kernel}.cu") as library:
        assert first_fault(library, dtype) is None
