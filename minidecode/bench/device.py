"""The machine that a result comes from: its description, its clocks, and its measured ceiling.

The ceiling is a pure read, measured here and now: what a datasheet promises no kernel reaches, and
a share of it would say little about the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minidecode
from minidecode.bench import timer
from minidecode.errors import MinidecodeError, MissingError
from minidecode.memory import free_memory
from minidecode.records import Environment, GpuState

if TYPE_CHECKING:
    import torch

# As much as a large model: the ceiling of a GPU is still rising at 1 GB.
_READ_BYTES = 8 << 30

# NVML's bits that mean the clocks are held down; idling and fixed application clocks do not.
_THROTTLE = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}

_ceilings: dict[str, float] = {}
_reads: dict[tuple[str, int], float] = {}


def environment(device: str | torch.device = "cpu") -> Environment:
    """The machine, the versions, and the device measured on.

    `read_bw_gb_s` is filled once `read_bandwidth(device)` has been measured in this process.
    """
    import torch

    device = torch.device(device)
    values: dict[str, Any] = {
        "minidecode": minidecode.__version__,
        "commit": _commit(),
        "time": utc_now(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "safetensors": _version("safetensors"),
        "numpy": _version("numpy"),
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "nvcc": _nvcc_version(),
        "driver": _driver_version(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": _cores(),
        "cpu_threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "device": _key(device).partition(",")[0],
        "read_bw_gb_s": _ceilings.get(_key(device)),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "gpu_memory_bytes": properties.total_memory,
            "sm_clock_max_mhz": _max_clock(device, "SM"),
            "memory_clock_max_mhz": _max_clock(device, "MEM"),
            "state": gpu_state(device),
        }
    return Environment(**values)


def gpu_state(device: str | torch.device) -> GpuState:
    """Clocks, temperature, power and throttling now; all None on a CPU or without NVML."""

    def read(nvml: Any, handle: Any) -> GpuState:
        def get(call: str, *args: Any) -> float | None:
            try:
                return float(getattr(nvml, call)(handle, *args))
            except (nvml.NVMLError, AttributeError):
                return None

        power = get("nvmlDeviceGetPowerUsage")
        reasons = get("nvmlDeviceGetCurrentClocksThrottleReasons")
        return GpuState(
            sm_clock_mhz=get("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            memory_clock_mhz=get("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            temperature_c=get("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1e3,
            throttle=None if reasons is None else _throttle_words(int(reasons)),
        )

    return _with_nvml(device, read) or GpuState()


def _throttle_words(reasons: int) -> str:
    return ", ".join(word for bit, word in _THROTTLE.items() if reasons & bit)


def _max_clock(device: torch.device, domain: str) -> float | None:
    def read(nvml: Any, handle: Any) -> float:
        return float(nvml.nvmlDeviceGetMaxClockInfo(handle, getattr(nvml, f"NVML_CLOCK_{domain}")))

    clock: float | None = _with_nvml(device, read)
    return clock


def _with_nvml(device: str | torch.device, read: Callable[[Any, Any], Any]) -> Any:
    """`read(pynvml, handle)`, or None without a GPU, without the package, or if NVML fails."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            # NVML does not know CUDA_VISIBLE_DEVICES, so the number of the device is no help.
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            return read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, AttributeError):
        return None


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def _nvcc_version() -> str | None:
    from minidecode.kernels import build

    try:
        return build.find_toolkit().version
    except MinidecodeError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _commit() -> str | None:
    """The checkout's commit, with "-dirty" if tracked files differ; None outside a checkout."""
    root = Path(minidecode.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def utc_now() -> str:
    """The time in ISO 8601, UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@functools.cache
def cpu_name() -> str:
    """The CPU's model, or at least its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


# --- the read ceiling -----------------------------------------------------------------------------


def _key(device: torch.device) -> str:
    """What a ceiling belongs to: a GPU, or the CPU with so many threads."""
    import torch

    if device.type == "cuda":
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    return f"{device.type}, {torch.get_num_threads()} threads"


def read_bandwidth(device: str | torch.device) -> float:
    """How fast `device` reads its memory, in GB/s: the best of a few ways, once a process.

    A GPU reads 8 GB, or half of what is free, with our own kernel; a CPU sums a buffer several
    times its caches with torch's threads. torch counts the buffer in its peak of allocated memory.
    Raises MissingError where the kernel cannot be compiled.
    """
    import torch

    device = torch.device(device)
    key = _key(device)
    if key not in _ceilings:
        n_bytes = _room(device, _READ_BYTES)
        buffer = _filled_buffer(n_bytes, device)
        _ceilings[key] = max(
            n_bytes / timer.time_callable(call, device, samples=7).median_us / 1e3
            for call in _readers(buffer, n_bytes)
        )
        del buffer
        _release(device)
    return _ceilings[key]


def read_us(device: str | torch.device, n_bytes: int) -> float:
    """Time of a pure read of `n_bytes` that are in no cache, µs; the best way, once a process.

    It is what a GEMV over as many bytes is measured against: a small read is further from the
    ceiling than a large one whatever the kernel does.
    """
    import torch

    device = torch.device(device)
    key = (_key(device), n_bytes)
    if key not in _reads:
        size = -(-n_bytes // 256) * 256  # each read starts aligned
        copies = timer.copies_beyond_cache(size, device)
        buffer = _filled_buffer(size * copies, device)
        ways = zip(
            *(_readers(buffer[i * size // 8 :], n_bytes) for i in range(copies)), strict=True
        )
        _reads[key] = min(timer.time_rotation(calls, device).median_us for calls in ways)
        del buffer, ways
        _release(device)
    return _reads[key]


def _release(device: torch.device) -> None:
    """Gives freed buffers back to the GPU: several GB that others may need."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _room(device: torch.device, wanted: int) -> int:
    """Up to `wanted` bytes that are free, a multiple of 256. Raises if caches could hold them."""
    free = free_memory(device)
    if device.type == "cuda":
        size = min(wanted, free // 2)
    else:
        # Four times the caches is as good as 8 GB, and a CPU takes seconds to fill those.
        size = min(wanted, max(256 << 20, 4 * timer.cache_bytes(device)), free // 4)
    if size < 2 * timer.cache_bytes(device):
        raise MinidecodeError(
            f"only {size >> 20} MB of memory to measure the read bandwidth of {device} with: "
            "a cache would serve it"
        )
    return size // 256 * 256


def _filled_buffer(n_bytes: int, device: torch.device) -> torch.Tensor:
    """int64 [n_bytes / 8] of numbers that do not compress; as floats they are finite."""
    import torch

    buffer = torch.empty(n_bytes // 4, dtype=torch.float32, device=device)
    return buffer.uniform_(0.5, 1.0).view(torch.int64)


def _readers(buffer: torch.Tensor, n_bytes: int) -> list[timer.Call]:
    """Several ways to read the first `n_bytes` of `buffer`, the same ones for each buffer."""
    if buffer.device.type == "cuda":
        return _cuda_readers(buffer, n_bytes)
    import torch

    words = buffer[: -(-n_bytes // 8)]
    floats = words.view(torch.float32)

    def integers() -> None:
        words.sum()

    def floating() -> None:
        floats.sum()

    return [integers, floating]


def _cuda_readers(buffer: torch.Tensor, n_bytes: int) -> list[timer.Call]:
    import torch

    library = _read_library()
    device = buffer.device
    sink = torch.empty(1, dtype=torch.float32, device=device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    n_bytes = -(-n_bytes // 16) * 16  # the kernel reads 16 at a time

    def reader(blocks: int, threads: int) -> timer.Call:
        def read() -> None:
            with torch.cuda.device(device):
                status = library.minidecode_read(
                    buffer.data_ptr(),
                    n_bytes,
                    sink.data_ptr(),
                    blocks,
                    threads,
                    torch.cuda.current_stream(device).cuda_stream,
                )
            if status != 0:
                raise MinidecodeError(f"the read kernel failed with CUDA error {status}")

        return read

    # A large read is fastest with no more in flight than it takes. Reads of a few MB want more
    # threads and small blocks.
    shapes = ((1, 512), (2, 256), (1, 1024), (2, 512), (4, 256), (8, 256), (16, 128))
    return [reader(per_sm * sms, threads) for per_sm, threads in shapes]


@functools.cache
def _read_library() -> ctypes.CDLL:
    from minidecode.kernels import build

    source = build.cuda_sources() / "step" / "read_bandwidth.cu"
    if not source.is_file():
        raise MissingError(f"{source} is missing: reinstall minidecode")
    library = build.build(source)
    library.minidecode_read.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.minidecode_read.restype = ctypes.c_int
    return library
