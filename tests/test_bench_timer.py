"""Timers: on the CPU against calls of known length."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minidecode.bench import timer
from minidecode.errors import MinidecodeError


def sleeper(seconds: float, log: list[str] | None = None, name: str = "") -> Callable[[], None]:
    def call() -> None:
        if log is not None:
            log.append(name)
        time.sleep(seconds)

    return call


def test_time_callable_measures_one_call() -> None:
    timing = timer.time_callable(sleeper(2e-3), "cpu", samples=5, inner=2)
    assert len(timing.samples_us) == 5
    assert 2_000 <= timing.median_us < 20_000
    assert timing.median_us <= timing.p95_us <= max(timing.samples_us)


def test_time_rotation_runs_every_call_equally_often() -> None:
    log: list[str] = []
    calls = [sleeper(1e-3, log, name) for name in "abc"]
    timing = timer.time_rotation(calls, "cpu", samples=4, sample_us=5_000)
    assert 1_000 <= timing.median_us < 20_000
    assert log == ["a", "b", "c"] * (len(log) // 3)
    assert len(timing.samples_us) == 4


def test_copies_go_beyond_the_cache() -> None:
    cache = timer.cache_bytes("cpu")
    assert cache >= 1 << 20
    for n_bytes in (cache // 100, cache, 100 * cache):
        copies = timer.copies_beyond_cache(n_bytes, "cpu")
        assert copies >= 2
        assert copies * n_bytes >= 4 * cache
    assert 1_000 < timer.copies_beyond_cache(1, "cpu") < 100_000


def test_cache_size_counts_each_shared_cache_once(tmp_path: Path) -> None:
    def cache(cpu: int, index: int, level: int, shared: str, size: str) -> None:
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
            (folder / name).write_text(f"{text}\n")

    assert timer._cpu_cache_bytes(tmp_path) == 32 << 20  # nothing there: a guess
    timer._cpu_cache_bytes.cache_clear()
    for cpu in range(4):
        cache(cpu, 0, 1, str(cpu), "32K")
        cache(cpu, 3, 3, "0-1" if cpu < 2 else "2-3", "16384K")
    assert timer._cpu_cache_bytes(tmp_path) == 2 * (16 << 20)


@pytest.mark.gpu
def test_graph_timing_on_the_gpu() -> None:
    n_bytes = 64 << 20
    copies = timer.copies_beyond_cache(n_bytes, "cuda")
    buffers = [torch.rand(n_bytes // 4, device="cuda") for _ in range(copies)]
    outs = [torch.empty((), device="cuda") for _ in buffers]

    def summing(buffer: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        def call() -> None:
            torch.sum(buffer, 0, out=out)

        return call

    calls = [summing(b, o) for b, o in zip(buffers, outs, strict=True)]
    timing = timer.time_rotation(calls, "cuda")
    assert 5 < timing.median_us < 1_000
    spread = timing.p95_us / timing.median_us
    assert spread < 1.5
    replay = timer.capture(calls, "cuda")
    for out in outs:
        out.fill_(float("nan"))
    replay()
    torch.cuda.synchronize()
    assert all(torch.isfinite(out) for out in outs)


@pytest.mark.gpu
def test_what_synchronises_cannot_be_captured() -> None:
    def synchronising() -> None:
        torch.cuda.synchronize()

    with pytest.raises(MinidecodeError, match=r"in a CUDA graph: .*not permitted"):
        timer.capture([synchronising], "cuda")
    # The failure leaves the device usable.
    assert 0 < float(torch.rand(3, device="cuda").sum()) < 3
