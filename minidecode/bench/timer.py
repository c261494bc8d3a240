"""Timing of device work: CUDA events around graph replays, a monotonic clock on the CPU.

Everything takes plain callables that only enqueue work, so nothing here knows what is timed.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minidecode.bench import stats
from minidecode.errors import MinidecodeError

if TYPE_CHECKING:
    import torch

Call = Callable[[], None]

# One sample lasts at least this long, so that the launch of a graph (10 to 20 us) and the grain of
# the clock stay below one per cent of it.
_SAMPLE_US = 2_000.0

# A graph of more nodes takes longer to capture and to launch than it is worth.
_MAX_NODES = 4_096

# The weights that a micro-benchmark cycles through are this many times as large as the cache.
_BEYOND_CACHE = 4


@dataclass(frozen=True)
class Timing:
    """Samples of the time of one call, in microseconds, in the order taken."""

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return stats.median(self.samples_us)

    @property
    def p95_us(self) -> float:
        return stats.percentile(self.samples_us, 95)


def cache_bytes(device: str | torch.device) -> int:
    """Size of the last cache before memory: a GPU's L2, all of a machine's L3 together."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _cpu_cache_bytes()


@functools.cache
def _cpu_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The sum over the separate last-level caches; 32 MB where the system does not tell."""
    caches: dict[tuple[int, str], int] = {}
    for folder in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((folder / "level").read_text())
            shared = (folder / "shared_cpu_list").read_text().strip()
            size = (folder / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if size[:-1].isdigit():
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 0)
            caches[level, shared] = int(size[:-1]) * unit
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last) or 32 << 20


def copies_beyond_cache(n_bytes: int, device: str | torch.device) -> int:
    """How many buffers of `n_bytes` to cycle through so that each is read from memory again.

    No more than one graph holds, so buffers of a few kB do come out of the cache.
    """
    copies = math.ceil(_BEYOND_CACHE * cache_bytes(device) / max(1, n_bytes))
    return min(max(2, copies), _MAX_NODES)


def capture(calls: Sequence[Call], device: str | torch.device) -> Call:
    """All `calls` in order, as one CUDA graph; on the CPU a loop. Each call is run once first.

    The result enqueues a replay on the current stream. Raises MinidecodeError if a call does what a
    graph cannot hold, such as synchronising.
    """
    import torch

    device = torch.device(device)
    calls = tuple(calls)

    def loop() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        loop()
        return loop
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loop()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                loop()
        except RuntimeError as error:
            _end_failed_capture(side)
            first: BaseException = error
            while first.__context__ is not None:  # ending a broken capture hides what broke it
                first = first.__context__
            reason = str(first).strip().splitlines()[0]
            raise MinidecodeError(f"cannot be captured in a CUDA graph: {reason}") from error

    def replay() -> None:
        # `calls` is named here so that what the graph points at lives as long as it does.
        assert calls
        with torch.cuda.device(device):
            graph.replay()

    return replay


def _end_failed_capture(stream: torch.cuda.Stream) -> None:
    """torch's random generator still believes in a capture that failed, until one has worked."""
    import torch

    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.empty(1, device="cuda").zero_()


class _Stopwatch:
    """Marks points in the device's work; `laps_us` are the times between one and the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[torch.cuda.Event] = []
        self.times: list[int] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.events.append(event)
        else:
            self.times.append(time.perf_counter_ns())

    def throttle(self, ahead: int) -> None:
        """Waits until the device is at most `ahead` marks behind the host."""
        if len(self.events) > ahead:
            self.events[-1 - ahead].synchronize()

    def laps_us(self) -> list[float]:
        if self.device.type == "cuda":
            self.events[-1].synchronize()
            pairs = zip(self.events, self.events[1:], strict=False)
            return [1e3 * first.elapsed_time(second) for first, second in pairs]
        return [(b - a) / 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]


def time_callable(
    call: Call,
    device: str | torch.device,
    *,
    samples: int = 20,
    inner: int = 1,
    warmup: int = 2,
) -> Timing:
    """Time of one `call`: `samples` samples, each the mean over `inner` calls back to back.

    On CUDA the samples are enqueued one after another without waiting, so what lies between two
    events is device time as long as a sample lasts longer than its launch.
    """
    import torch

    device = torch.device(device)
    for _ in range(warmup):
        call()
    watch = _Stopwatch(device)
    watch.mark()
    for _ in range(samples):
        for _ in range(inner):
            call()
        watch.mark()
        watch.throttle(8)
    return Timing(tuple(lap / inner for lap in watch.laps_us()))


def time_rotation(
    calls: Sequence[Call],
    device: str | torch.device,
    *,
    samples: int = 15,
    sample_us: float = _SAMPLE_US,
) -> Timing:
    """Time of one of `calls`, which do the same on different buffers, run round and round.

    With enough buffers (`copies_beyond_cache`) each call finds its own gone from the cache. On CUDA
    one captured graph holds as many rounds as make a sample of `sample_us`.
    """
    import torch

    device = torch.device(device)
    calls = tuple(calls)
    most = max(1, _MAX_NODES // len(calls)) if device.type == "cuda" else 1
    rounds = 1
    while True:
        replay = capture(calls * rounds, device)
        lap = max(time_callable(replay, device, samples=3).median_us, 1e-3)
        if rounds == most or lap >= sample_us / 2:
            break
        # A short graph is mostly launch: what is estimated from it is measured again.
        rounds = min(most, math.ceil(rounds * sample_us / lap))
    # What does not fit into one graph is made up for by running it several times a sample.
    inner = max(1, math.ceil(sample_us / lap))
    timing = time_callable(replay, device, samples=samples, inner=inner)
    count = len(calls) * rounds
    return Timing(tuple(sample / count for sample in timing.samples_us))
