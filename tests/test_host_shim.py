"""The host shim itself: what works on it as on a GPU, and the faults it catches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import needs
import numpy as np
import pytest
import shim
from shim import STREAM, HostKernelError

pytestmark = needs.present(shim.unavailable())

ORDERS = range(4)


@pytest.fixture(scope="module")
def library() -> Iterator[shim.Runner]:
    with shim.host_library(shim.HERE / "selftest.cu") as runner:
        yield runner


def test_warp_operations(library: shim.Runner) -> None:
    lane = np.arange(32)
    segment, within = lane // 8 * 8, lane % 8
    expected = [
        segment + 9 % 8,
        np.where(within >= 3, lane - 3, lane),
        np.where(within < 5, lane + 3, lane),
        lane ^ 4,
        np.full(32, sum(1 << i for i in range(0, 32, 3))),
        np.full(32, 2),
        np.full(32, 7),
        np.where(lane < 16, lane ^ 1, lane ^ 2),
    ]
    for order in ORDERS:
        out = np.zeros((8, 32), np.uint32)
        assert library.call("run_warp_operations", out, STREAM, order=order) == 0
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("mode", "report"),
    [
        (1, "divergent warp"),
        (2, "16 threads at __syncthreads, 48 threads exited"),
        (3, "48 threads at __syncthreads"),
        (4, "which is not in it"),
        (5, "64 threads polling"),
        (6, "no answer in 2 s"),
    ],
)
def test_divergence_is_caught(library: shim.Runner, mode: int, report: str) -> None:
    out = np.zeros(64, np.float32)
    assert library.call("run_divergence", out, 0, STREAM) == 0
    with pytest.raises(HostKernelError, match=report):
        library.call("run_divergence", out, mode, STREAM, timeout=2)
    assert library.call("run_divergence", out, 0, STREAM) == 0  # in a new process


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_blocks_of_a_cluster_see_each_other(library: shim.Runner, blocks: int) -> None:
    following = np.roll(np.arange(blocks), -1)[:, None]
    t = np.arange(64)
    for order in ORDERS:
        out = np.zeros((blocks, 64), np.float32)
        assert library.call("run_neighbours", out, blocks, 0, STREAM, order=order) == 0
        np.testing.assert_array_equal(out, 1100 * following + t % 4 + t)


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_missing_cluster_barrier_is_caught(library: shim.Runner, mode: int, order: int) -> None:
    out = np.zeros((2, 64), np.float32)
    with pytest.raises(HostKernelError, match="use-after-poison"):
        library.call("run_neighbours", out, 2, mode, STREAM, order=order)


def test_grid_barrier(library: shim.Runner) -> None:
    out = np.zeros((5, 32), np.float32)
    assert library.call("run_whole_grid", out, 5, 1, STREAM) == 0
    np.testing.assert_array_equal(out[:, 7], [1, 2, 3, 4, 0])
    with pytest.raises(HostKernelError, match="not cooperative"):
        library.call("run_whole_grid", out, 5, 0, STREAM)


def staged_dot(library: shim.Runner, mode: int, **options: object) -> float:
    """The kernel's answer for w = x = ones of 16,384: above 48 KB of shared memory."""
    out, ones = np.full(1, np.nan, np.float32), np.ones(16384, np.float32)
    w, x = ones, ones.copy()
    status = library.call("run_staged_dot", out, w, x, 16384, mode, STREAM, late=[x], **options)
    assert status == 0
    return float(out[0])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_bulk_copies(library: shim.Runner, capability: tuple[int, int]) -> None:
    for order in ORDERS:
        assert staged_dot(library, 0, order=order, capability=capability) == 16384


def test_faults_around_bulk_copies_are_caught(library: shim.Runner) -> None:
    with pytest.raises(HostKernelError, match="before its init is visible"):
        staged_dot(library, 1, order=1, capability=(8, 0))
    with pytest.raises(HostKernelError, match="use-after-poison"):
        staged_dot(library, 2)
    with pytest.raises(HostKernelError, match="before its bulk copies had arrived"):
        staged_dot(library, 3)


class Nested(ctypes.Structure):
    _fields_ = (("shift", ctypes.c_int), ("terms", ctypes.c_void_p * 2))


class Arguments(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("in_", ctypes.c_void_p), ("nested", Nested))


def test_structure_arguments(library: shim.Runner) -> None:
    out, values, term = np.zeros(8, np.float32), np.arange(8, dtype=np.float32), np.float32([10])
    nested = Nested(3, (ctypes.c_void_p * 2)(None, term.ctypes.data))
    args = Arguments(out.ctypes.data, values.ctypes.data, nested)
    assert library.call("run_structure", args, STREAM, buffers=[out, values, term]) == 0
    np.testing.assert_array_equal(out, values + 13)
    with pytest.raises(ValueError, match="in none of the call's arrays"):
        library.call("run_structure", args, STREAM, buffers=[out, values])


@pytest.mark.parametrize("offset", [0, 1])
def test_array_bounds(library: shim.Runner, offset: int) -> None:
    out = np.zeros(8 + offset, np.float32)[offset:]
    assert library.call("run_stores", out, 7, 7, STREAM) == 0
    assert out[7] == 1
    with pytest.raises(HostKernelError, match="heap-buffer-overflow"):
        library.call("run_stores", out, 8, 0, STREAM)
    with pytest.raises(HostKernelError, match=r"heap-buffer-overflow|bytes before an array"):
        library.call("run_stores", out, -1, 0, STREAM)
    with pytest.raises(HostKernelError, match="out of bounds"):
        library.call("run_stores", out, 0, 8, STREAM)
    out.flags.writeable = False
    with pytest.raises(HostKernelError, match="read-only"):
        library.call("run_stores", out, 0, 0, STREAM)


def test_shared_memory_starts_as_nan(library: shim.Runner) -> None:
    out = np.zeros((2, 3), np.float32)
    assert library.call("run_leftovers", out, STREAM) == 0
    assert np.isnan(out).all()


def test_launch_limits(library: shim.Runner) -> None:
    out = np.zeros(8, np.float32)

    def status(blocks: int, threads: int, shared_bytes: int) -> int:
        return library.call("run_shape", out, blocks, threads, shared_bytes, STREAM)

    assert status(2, 1024, 227 * 1024) == 0
    assert status(2, 1025, 0) == 9  # cudaErrorInvalidConfiguration
    assert status(0, 32, 0) == 9
    assert status(2, 32, 227 * 1024 + 1) == 1  # cudaErrorInvalidValue


def test_another_stream_is_caught(library: shim.Runner) -> None:
    with pytest.raises(HostKernelError, match="not on the caller's stream"):
        library.call("run_stores", np.zeros(8, np.float32), 0, 0, None)


def test_compiler_errors_name_file_and_line() -> None:
    source = shim.CUDA / "gemv" / "naive.cu"
    with pytest.raises(shim.HostCompileError, match=rf"{source}:2:.*nonsense"):
        shim.build_library(source, overlay={source: "// broken\nnonsense;\n"})
