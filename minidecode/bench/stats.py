"""Statistics for timings: medians, a paired A/B comparison with its interval, noise and drift.

Nothing here imports torch, so that the statistics can be tested and used on any machine. All random
draws are seeded: the same samples always give the same interval and the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from minidecode.errors import MinidecodeError

FloatArray = npt.NDArray[np.float64]
Verdict: TypeAlias = Literal["faster", "slower", "no difference"]

# Below this many pairs (half as many folded ratios) no interval that comes from the samples alone
# can hold a median 95 times in 100: even the smallest to the largest of five holds it 94 times.
MIN_PAIRS = 12

# What is not in the spread of the samples: two captures of the same kernels differ for good, on
# H200s at full clocks by up to half as much. The least noise floor.
MIN_EFFECT = 0.002

_RESAMPLES = 10_000
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its confidence interval."""

    value: float
    low: float
    high: float

    def __contains__(self, truth: float) -> bool:
        return self.low <= truth <= self.high


@dataclass(frozen=True)
class Comparison:
    """The outcome of an A/B run; `ratio` is b's speed over a's.

    Its interval is the bootstrap's, wider by the noise floor `floor` at both ends: 0.002 is 0.2 %.
    """

    ratio: Interval
    noise: Interval
    floor: float
    verdict: Verdict


def _checked(samples: Sequence[float], what: str = "samples") -> FloatArray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise MinidecodeError(f"no {what} to take statistics of")
    if not np.isfinite(values).all():
        raise MinidecodeError(f"{what} contain a NaN or an infinity")
    return values


def median(samples: Sequence[float]) -> float:
    """The median, the mean of the middle two for an even number."""
    return float(np.median(_checked(samples)))


def percentile(samples: Sequence[float], pct: float) -> float:
    """The `pct`-th percentile (0 to 100), interpolated linearly between samples."""
    return float(np.percentile(_checked(samples), pct))


def mean_sd(samples: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n − 1); the deviation of a single sample is 0."""
    values = _checked(samples)
    return float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else 0.0


def bootstrap_median(
    samples: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The median with its percentile bootstrap interval.

    Percentile, not BCa: the jackknife that BCa takes its acceleration from is not consistent
    for a median. The percentiles are moved outwards as Student's t asks for (Hesterberg, "What
    Teachers Should Know About the Bootstrap", 2015): without it, 95 % intervals hold 93 % of the
    time at 10 to 50 samples.
    """
    values = _checked(samples)
    if values.size < 2:
        raise MinidecodeError("one sample has no interval")
    draws = np.random.default_rng(seed).integers(values.size, size=(resamples, values.size))
    medians = np.median(values[draws], axis=1)
    widen = (values.size / (values.size - 1)) ** 0.5
    tail = 100.0 * _NORMAL.cdf(-widen * _student_t(0.5 + confidence / 2, values.size - 1))
    low, high = np.percentile(medians, [tail, 100.0 - tail])
    return Interval(float(np.median(values)), float(low), float(high))


def _student_t(p: float, freedom: int) -> float:
    """Quantile of Student's t by its expansion in 1 / freedom, good to 1 % from 5 degrees on."""
    z = _NORMAL.inv_cdf(p)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def paired_ratio(
    a_us: Sequence[float],
    b_us: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> Interval:
    """How many times as fast as `a` `b` is: the median of a's time over b's, pair by pair.

    `a_us[i]` and `b_us[i]` were measured next to each other, a first where i is even and b first
    where it is odd (AB BA AB …). Each AB pair is folded with the BA pair after it into one ratio,
    their geometric mean, so that neither a linear drift nor an advantage of coming first is taken
    for a difference; an odd pair at the end is left out.

    Raises MinidecodeError for fewer than MIN_PAIRS pairs, unequal lengths, or times that are not
    positive.
    """
    a, b = _checked(a_us, "times"), _checked(b_us, "times")
    if a.size != b.size:
        raise MinidecodeError(f"{a.size} times of one arm cannot pair with {b.size} of the other")
    if a.size < MIN_PAIRS:
        raise MinidecodeError(f"{a.size} pairs are too few for an interval, it takes {MIN_PAIRS}")
    if (a <= 0).any() or (b <= 0).any():
        raise MinidecodeError("times contain one that is not positive")
    logs = np.log(a / b)
    folded = logs[: a.size // 2 * 2].reshape(-1, 2).mean(axis=1)
    # The median commutes with exp, so the interval of the logs is that of the ratios.
    fit = bootstrap_median(folded, confidence=confidence, resamples=resamples, seed=seed)
    return Interval(*(float(np.exp(x)) for x in (fit.value, fit.low, fit.high)))


def noise_floor(noise: Interval) -> float:
    """The greater of MIN_EFFECT and what `noise`, a kernel against itself, leaves possible."""
    return max(MIN_EFFECT, abs(noise.low - 1.0), abs(noise.high - 1.0))


def verdict(ratio: Interval) -> Verdict:
    """Whether b is faster or slower than a: only if the interval leaves out 1."""
    if 1.0 in ratio:
        return "no difference"
    return "faster" if ratio.value > 1.0 else "slower"


def compare(
    a_us: Sequence[float],
    b_us: Sequence[float],
    noise_first_us: Sequence[float],
    noise_second_us: Sequence[float],
    *,
    seed: int = 0,
) -> Comparison:
    """An A/B run and its A/A run, both in the order that `paired_ratio` asks for, judged."""
    fit = paired_ratio(a_us, b_us, seed=seed)
    noise = paired_ratio(noise_first_us, noise_second_us, seed=seed + 1)
    floor = noise_floor(noise)
    ratio = Interval(fit.value, fit.low / (1.0 + floor), fit.high * (1.0 + floor))
    return Comparison(ratio, noise, floor, verdict(ratio))


def drift(samples: Sequence[float]) -> float:
    """How far the last quarter's median lies from the first quarter's: 0.05 is 5 % slower."""
    values = _checked(samples)
    quarter = max(1, values.size // 4)
    return float(np.median(values[-quarter:]) / np.median(values[:quarter]) - 1.0)
