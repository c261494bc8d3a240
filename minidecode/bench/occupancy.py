"""Theoretical occupancy: the share of a multiprocessor's warps that a kernel's blocks can fill.

CUDA computes it for a kernel's handle, which a Python kernel, cuBLAS or a compiled library does not
give away. So a call is run once under the profiler, whose record of a kernel has its block size,
registers and shared memory, and the rest is arithmetic (CUDA's own, `cuda_occupancy.h`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WARP = 32
# Registers are given out to whole warps in units of this, within each quarter of a multiprocessor.
_REGISTER_UNIT = 256
_QUARTERS = 4
# Shared memory is given out in units of this: 256 bytes before compute capability 8.0, which
# differs by nothing that a kernel here could notice.
_SHARED_UNIT = 128

# CUdevice_attribute
_MAX_THREADS = 39
_MAX_SHARED_BYTES = 81
_MAX_REGISTERS = 82
_MAX_BLOCKS = 106
_RESERVED_SHARED_BYTES = 111


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor has room for; `reserved` bytes of shared memory go to each block."""

    threads: int
    blocks: int
    registers: int
    shared_bytes: int
    reserved_bytes: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel as the profiler saw it: threads of a block, registers of a thread."""

    name: str
    threads: int
    registers: int
    shared_bytes: int
    duration_us: float


def theoretical(launch: Launch, sm: Multiprocessor) -> float:
    """Resident warps over the most that there can be, 0 to 1, whatever the grid."""
    warps = _over(launch.threads, WARP)
    per_warp = _over(max(1, launch.registers) * WARP, _REGISTER_UNIT) * _REGISTER_UNIT
    room_for_warps = sm.registers // _QUARTERS // per_warp * _QUARTERS
    shared = _over(launch.shared_bytes + sm.reserved_bytes, _SHARED_UNIT) * _SHARED_UNIT
    blocks = min(
        sm.blocks,
        sm.threads // WARP // warps,
        room_for_warps // warps,
        sm.shared_bytes // shared if shared else sm.blocks,
    )
    return blocks * warps / (sm.threads // WARP)


def of_call(call: Callable[[], None], device: torch.device) -> float | None:
    """The occupancy of the longest kernel that `call` launches on the GPU `device`.

    None where the profiler or the driver does not tell.
    """
    sm = multiprocessor(device)
    if sm is None:
        return None
    # The first session of a process may lose its records to the profiler's own start.
    for _ in range(2):
        launches = _profiled(call, device)
        if launches:
            return theoretical(max(launches, key=lambda launch: launch.duration_us), sm)
    return None


def multiprocessor(device: torch.device) -> Multiprocessor | None:
    """The limits of a GPU's multiprocessors, from the driver."""
    import torch

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), index) != 0:
        return None

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        failed = driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return 0 if failed else value.value

    found = Multiprocessor(
        attribute(_MAX_THREADS),
        attribute(_MAX_BLOCKS),
        attribute(_MAX_REGISTERS),
        attribute(_MAX_SHARED_BYTES),
        attribute(_RESERVED_SHARED_BYTES),
    )
    return found if found.threads and found.blocks and found.registers else None


def launches_of(trace: Mapping[str, Any]) -> list[Launch]:
    """The kernels in a trace that torch.profiler wrote."""
    found = []
    for event in trace.get("traceEvents", ()):
        args = event.get("args", {})
        if event.get("cat") != "kernel" or "registers per thread" not in args:
            continue
        x, y, z = args["block"]
        found.append(
            Launch(
                str(event["name"]),
                int(x) * int(y) * int(z),
                int(args["registers per thread"]),
                int(args.get("shared memory", 0)),
                float(event.get("dur", 0.0)),
            )
        )
    return found


def _profiled(call: Callable[[], None], device: torch.device) -> list[Launch]:
    import torch

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as session:
            call()
            torch.cuda.synchronize(device)
        path = Path(folder) / "trace.json"
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            session.export_chrome_trace(str(path))
            return launches_of(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    return []


def _over(value: int, unit: int) -> int:
    return -(-value // unit)
