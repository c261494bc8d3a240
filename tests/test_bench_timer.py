"""Timers: on the CPU against calls of known length, by a clock that only they move."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minidecode.bench import timer
from minidecode.errors import MinidecodeError


def calls_that_take(
    monkeypatch: pytest.MonkeyPatch, **us: float
) -> tuple[list[Callable[[], None]], list[str]]:
    """A call for each name, which moves the clock on by so much, and the log of all of them."""
    log: list[str] = []

    def now() -> int:
        return round(sum(1e3 * us[name] for name in log))

    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter_ns=now))
    return [functools.partial(log.append, name) for name in us], log


def test_time_callable_measures_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,), log = calls_that_take(monkeypatch, a=7.0)
    timing = timer.time_callable(call, "cpu", samples=5, inner=2)
    assert timing.samples_us == (7.0,) * 5
    assert len(log) == 2 + 5 * 2


def test_time_rotation_runs_every_call_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, log = calls_that_take(monkeypatch, a=1.0, b=2.0, c=6.0)
    timing = timer.time_rotation(calls, "cpu", samples=4, sample_us=20.0)
    assert timing.samples_us == (3.0,) * 4
    # Captured, then a guess of 2 + 3 rounds, then a warm-up of 2 and samples of 3.
    assert log == ["a", "b", "c"] * (1 + 5 + 2 + 4 * 3)


def test_the_percentiles_of_a_timing() -> None:
    timing = timer.Timing((3.0, 1.0, 2.0))
    assert (timing.median_us, timing.p95_us) == pytest.approx((2.0, 2.9))


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
