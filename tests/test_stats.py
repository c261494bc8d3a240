"""The statistics of `bench`: known values, and simulations of machines that drift.

A simulated machine gives a time per step from a true speed, a drift over the run, an advantage of
coming first in a pair, and noise. All are seeded, so each test always sees the same runs.
"""

from __future__ import annotations

import ast
import inspect
import math
import statistics
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from minidecode.bench import stats
from minidecode.bench.stats import (
    MIN_EFFECT,
    MIN_PAIRS,
    Interval,
    Verdict,
    bootstrap_median,
    compare,
    drift,
    mean_sd,
    median,
    noise_floor,
    paired_ratio,
    percentile,
    verdict,
)
from minidecode.errors import MinidecodeError
from minidecode.records import FASTER, NO_DIFFERENCE, SLOWER

FloatArray = npt.NDArray[np.float64]
RUNS = 200
PAIRS = 40


def noise(
    rng: np.random.Generator, size: int, *, heavy: bool = False, spread: float = 0.01
) -> FloatArray:
    """On the log of a time: normal, or Student's t with outliers of any size."""
    return spread * (rng.standard_t(2, size) if heavy else rng.normal(size=size))


def interleaved(
    seed: int,
    *,
    speed: float = 1.0,
    slowing: float = 0.05,
    first: float = 0.0,
    heavy: bool = False,
    pairs: int = PAIRS,
    spread: float = 0.01,
) -> tuple[FloatArray, FloatArray]:
    """Times of a and b in AB BA AB … order; b is `speed` times as fast."""
    rng = np.random.default_rng(seed)
    level = 100.0 * (1.0 + slowing * np.linspace(0.0, 1.0, 2 * pairs))
    times = level * np.exp(noise(rng, 2 * pairs, heavy=heavy, spread=spread))
    times[0::2] *= 1.0 + first
    pair = times.reshape(pairs, 2)
    a_first = np.arange(pairs) % 2 == 0
    a = np.where(a_first, pair[:, 0], pair[:, 1])
    b = np.where(a_first, pair[:, 1], pair[:, 0]) / speed
    return a, b


def a_then_b(seed: int, *, speed: float) -> tuple[FloatArray, FloatArray]:
    """The same machine, all of a measured before all of b."""
    rng = np.random.default_rng(seed)
    level = 100.0 * (1.0 + 0.05 * np.linspace(0.0, 1.0, 2 * PAIRS))
    times = level * np.exp(noise(rng, 2 * PAIRS))
    return times[:PAIRS], times[PAIRS:] / speed


def coverage(intervals: list[Interval], truth: float) -> float:
    return sum(truth in interval for interval in intervals) / len(intervals)


@pytest.mark.parametrize("speed", [1.0, 1.03, 0.8])
def test_interleaved_intervals_cover_the_truth_under_drift(speed: float) -> None:
    intervals = [paired_ratio(*interleaved(seed, speed=speed)) for seed in range(RUNS)]
    assert 0.92 <= coverage(intervals, speed) <= 0.99


def test_a_then_b_misses_the_truth_under_the_same_drift() -> None:
    # The reason for interleaving: half of the drift lands in the ratio.
    speed = 1.03
    intervals = [paired_ratio(*a_then_b(seed, speed=speed)) for seed in range(RUNS)]
    assert coverage(intervals, speed) < 0.1
    values = [interval.value for interval in intervals]
    assert statistics.median(values) == pytest.approx(speed / 1.025, rel=5e-3)


@pytest.mark.parametrize("pairs", [MIN_PAIRS, 20, 101])
def test_coverage_holds_with_few_pairs_outliers_and_an_advantage_of_coming_first(
    pairs: int,
) -> None:
    intervals = [
        paired_ratio(*interleaved(seed, speed=1.03, first=0.02, heavy=True, pairs=pairs))
        for seed in range(RUNS)
    ]
    assert 0.92 <= coverage(intervals, 1.03) <= 0.99


def test_an_advantage_of_coming_first_does_not_widen_the_interval() -> None:
    def width(first: float) -> float:
        fits = [paired_ratio(*interleaved(seed, first=first)) for seed in range(20)]
        return statistics.mean(fit.high - fit.low for fit in fits)

    assert width(0.05) == pytest.approx(width(0.0), rel=0.02)


def test_intervals_are_no_wider_than_they_need_to_be() -> None:
    # Noise of each folded ratio: 1 % on each of four times, averaged in pairs. The sample median of
    # m normal values has standard error 1.25 / sqrt(m).
    fits = [paired_ratio(*interleaved(seed)) for seed in range(RUNS)]
    width = statistics.median(fit.high - fit.low for fit in fits)
    ideal = 2 * 1.96 * 1.2533 * 0.01 / math.sqrt(PAIRS / 2)
    assert 0.8 * ideal < width < 1.35 * ideal


def test_the_same_kernel_twice_is_rarely_called_different() -> None:
    fits = [paired_ratio(*interleaved(seed)) for seed in range(RUNS)]
    assert 1.0 - coverage(fits, 1.0) <= 0.07
    without_floor = [verdict(fit) for fit in fits]
    assert sum(v != NO_DIFFERENCE for v in without_floor) <= 0.07 * RUNS
    verdicts = [
        compare(*interleaved(seed), *interleaved(10_000 + seed)).verdict for seed in range(RUNS)
    ]
    # With the noise floor as well, ten A/A runs in a row are expected to say "no difference".
    assert sum(v != NO_DIFFERENCE for v in verdicts) <= 0.015 * RUNS


def test_captures_that_differ_for_good_are_rarely_called_different() -> None:
    """By 0.05 % each. 25 pairs of captures on H200s at full clocks differ by 0.04 % (r.m.s.)."""
    drawn = np.random.default_rng(0).normal(scale=5e-4, size=(RUNS, 3))
    verdicts = []
    for seed, (a, b, again) in enumerate(drawn):
        arms = interleaved(seed, speed=math.exp(b - a), spread=3e-4, pairs=20)
        noise_arms = interleaved(10_000 + seed, speed=math.exp(again - a), spread=3e-4, pairs=20)
        verdicts.append(compare(*arms, *noise_arms).verdict)
    assert sum(v != NO_DIFFERENCE for v in verdicts) <= 0.07 * RUNS


def test_real_differences_are_found_under_drift() -> None:
    for speed, expected in ((1.03, FASTER), (0.97, SLOWER)):
        verdicts = [
            compare(*interleaved(seed, speed=speed), *interleaved(10_000 + seed)).verdict
            for seed in range(50)
        ]
        assert verdicts.count(expected) >= 48
        assert set(verdicts) <= {expected, NO_DIFFERENCE}


def test_verdict_is_the_interval_s() -> None:
    assert verdict(Interval(1.05, 1.04, 1.06)) == FASTER
    assert verdict(Interval(0.95, 0.94, 0.96)) == SLOWER
    assert verdict(Interval(1.05, 0.99, 1.10)) == NO_DIFFERENCE


def test_the_noise_floor_is_the_furthest_that_the_same_kernel_was_from_itself() -> None:
    assert noise_floor(Interval(1.0, 1.0, 1.0)) == MIN_EFFECT
    assert noise_floor(Interval(1.0, 0.9995, 1.0004)) == MIN_EFFECT
    assert noise_floor(Interval(1.0, 0.94, 1.001)) == pytest.approx(0.06)
    assert noise_floor(Interval(1.03, 1.001, 1.06)) == pytest.approx(0.06)


def test_the_interval_is_wider_by_the_noise_floor() -> None:
    """Two captures may differ for good, which no spread within a run tells."""
    a, b = interleaved(1, speed=1.0 + MIN_EFFECT / 2, spread=1e-5)
    quiet = interleaved(2, spread=1e-5)
    fit, found = paired_ratio(a, b), compare(a, b, *quiet)
    assert 1.0 not in fit
    assert found.floor == MIN_EFFECT
    assert found.ratio.value == fit.value
    assert found.ratio.low == pytest.approx(fit.low * (1 - MIN_EFFECT), rel=1e-5)
    assert found.ratio.high == pytest.approx(fit.high * (1 + MIN_EFFECT), rel=1e-5)
    assert found.verdict == NO_DIFFERENCE
    assert compare(*interleaved(1, speed=1.005, spread=1e-5), *quiet).verdict == FASTER
    noisy = interleaved(2, spread=0.05)
    assert compare(*interleaved(1, speed=1.005, spread=1e-5), *noisy).verdict == NO_DIFFERENCE


def test_the_same_samples_give_the_same_interval() -> None:
    a, b = interleaved(3, speed=1.1)
    assert paired_ratio(a, b) == paired_ratio(list(a), list(b))
    assert paired_ratio(a, b, seed=1, resamples=9) != paired_ratio(a, b, resamples=9)
    assert paired_ratio(a, b, confidence=0.5).high < paired_ratio(a, b).high


def test_swapping_the_arms_inverts_the_ratio() -> None:
    a, b = interleaved(5, speed=1.2)
    forth, back = paired_ratio(a, b), paired_ratio(b, a)
    assert forth.value == pytest.approx(1.0 / back.value, rel=1e-12)
    assert forth.low == pytest.approx(1.0 / back.high, rel=3e-3)


def test_noiseless_times_give_the_exact_ratio() -> None:
    a = [200.0] * MIN_PAIRS
    b = [100.0] * MIN_PAIRS
    fit = paired_ratio(a, b)
    assert (fit.value, fit.low, fit.high) == pytest.approx((2.0, 2.0, 2.0))
    # One outlier, and the odd pair at the end, change nothing.
    assert paired_ratio([*a[:-1], 9e9], b).value == pytest.approx(2.0)
    assert paired_ratio([*a, 1.0], [*b, 1.0]) == fit


def test_verdicts_are_the_words_of_the_records() -> None:
    assert set(get_args(Verdict)) == {FASTER, SLOWER, NO_DIFFERENCE}


def test_student_t_is_near_the_tables() -> None:
    for freedom, table in ((5, 2.571), (9, 2.262), (19, 2.093), (29, 2.045), (1000, 1.962)):
        assert stats._student_t(0.975, freedom) == pytest.approx(table, rel=0.01)


def test_simple_statistics() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile(list(range(101)), 95) == 95.0
    samples = [2.0, 4.0, 4.0, 5.0]
    assert mean_sd(samples) == pytest.approx((statistics.mean(samples), statistics.stdev(samples)))
    assert mean_sd([7.0]) == (7.0, 0.0)


def test_an_interval_is_as_wide_as_so_few_samples_ask_for() -> None:
    # Of all draws of these five, 5.8 % have the median 1. Student's t and the widening cut off
    # 4.4 % at each end; without the widening it would be 6.3 %, by the plain percentiles 10 %.
    fit = bootstrap_median([1.0, 2.0, 3.0, 4.0, 5.0], confidence=0.8, resamples=100_000)
    assert fit == Interval(3.0, 1.0, 5.0)


def test_drift_sees_slow_change_and_not_noise() -> None:
    rng = np.random.default_rng(0)
    steady = 100.0 * np.exp(noise(rng, 200))
    assert abs(drift(steady)) < 0.01
    slowing = steady * np.linspace(1.0, 1.08, 200)
    assert drift(slowing) == pytest.approx(0.06, abs=0.01)  # quarter to quarter: 6 of the 8 %
    assert drift(slowing[::-1]) < -0.04
    assert drift([1.0, 1.5]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "no times"),
        ([1.0] * 12, [1.0] * 11, "12 times of one arm cannot pair with 11"),
        ([1.0] * 11, [1.0] * 11, "11 pairs are too few"),
        ([1.0] * 11 + [0.0], [1.0] * 12, "not positive"),
        ([1.0] * 11 + [math.nan], [1.0] * 12, "NaN"),
    ],
)
def test_unusable_times_are_refused(a: list[float], b: list[float], message: str) -> None:
    with pytest.raises(MinidecodeError, match=message):
        paired_ratio(a, b)


def test_statistics_of_nothing_are_refused() -> None:
    for function in (median, mean_sd, drift, bootstrap_median):
        with pytest.raises(MinidecodeError, match="no samples"):
            function([])
    with pytest.raises(MinidecodeError, match="one sample has no interval"):
        bootstrap_median([1.0])


def test_stats_import_nothing_heavy() -> None:
    tree = ast.parse(inspect.getsource(stats))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    assert not {m for m in modules if m.split(".")[0] == "torch"}
    assert {m for m in modules if m.startswith("minidecode")} == {"minidecode.errors"}
