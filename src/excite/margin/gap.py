"""The largest vertical distance between two margin curves, with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gap:
    """The largest vertical distance between two margin curves; converts to float.

        sup over ε of |F(ε) − G(ε)|, where F and G are the fractions misclassified within ε

    Attributes:
        value: the distance of the two samples.
        low: lower end of the interval.
        high: upper end of the interval.
        level: probability, at least, that [low, high] holds the distance of the two distributions that were sampled.

    Example:
        >>> quick = SearchOptions(steps=20, restarts=1, evidence=False, certify=False)
        >>> train, test = (excite.margins(model, x[i : i + 3], y[i : i + 3], options=quick) for i in (0, 3))
        >>> gap = train.gap(test)
        >>> 0 <= gap.low <= float(gap) <= gap.high
        True
    """

    value: float
    low: float
    high: float
    level: float = 0.95

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.level:.0%} interval {self.low:.3f} to {self.high:.3f})"


def common_grid(samples: Iterable[Array]) -> Array:
    """The sorted distinct values of all samples; the last is always +inf, where points without an adversarial example are."""
    return np.unique(np.concatenate([*samples, [np.inf]]))


def frequencies(places: npt.NDArray[np.intp], size: int) -> Array:
    """The fraction of a sample at each of `size` points of a grid, from the index of the point of each of its values."""
    return np.asarray(np.bincount(places, minlength=size) / len(places))


def curve_difference(a: Array, b: Array) -> Array:
    """F − G at the finite points of a grid (both are 1 at +inf), from the `frequencies` of two samples."""
    return np.asarray(np.cumsum(a - b)[:-1])


def ks_distance(a: Array, b: Array) -> float:
    """The two-sample Kolmogorov–Smirnov distance, max |F − G|, from the `frequencies` of two samples on a common grid.

    The same as the statistic of `scipy.stats.ks_2samp`, which takes the samples themselves: resampling needs thousands of
    distances on one grid.
    """
    return float(np.abs(curve_difference(a, b)).max(initial=0.0))


def ks_of_samples(a: Array, b: Array) -> float:
    """The two-sample Kolmogorov–Smirnov distance of the margins a (n,) and b (m,); a censored margin is +inf."""
    grid = common_grid((a, b))
    return ks_distance(*(frequencies(np.searchsorted(grid, sample), len(grid)) for sample in (a, b)))


def chance_gap(n: int, m: int, level: float = 0.95) -> float:
    """The Kolmogorov–Smirnov distance that samples of n and m points from one distribution exceed with probability 1 − level.

        √(−ln((1 − level)/2)/2) · √((n + m)/(n m))

    The limit for many points; at most 1. Two samples of 64 differ by up to 0.24, two of 500 by up to 0.086.
    """
    return min(1.0, critical_value(level) * math.sqrt((n + m) / (n * m)))


def critical_value(level: float = 0.95) -> float:
    """√(−ln((1 − level)/2)/2), the quantile of Kolmogorov's distribution to first order: 1.358 at 95 %."""
    return math.sqrt(-math.log((1 - level) / 2) / 2)


def ks_gap(a: Array, b: Array, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Gap:
    """The two-sample Kolmogorov–Smirnov distance of the margins a (n,) and b (m,); a censored margin is +inf.

    The interval: resampling the distance itself would be biased upwards, most of all where the curves agree (the
    distance of two samples of one distribution is never 0). Instead the *difference of the curves* is resampled:
        T = sup |(F* − G*) − (F − G)|,
    whose upper quantile q at `level` bounds the error of the whole difference at once, hence of its largest absolute
    value: [value − q, value + q], cut to [0, 1]. Conservative; it contains 0 whenever the curves may well be the same.
    """
    grid = common_grid((a, b))
    bins = [frequencies(np.searchsorted(grid, sample), len(grid)) for sample in (a, b)]
    difference, value = curve_difference(*bins), ks_distance(*bins)
    rng = np.random.default_rng(seed)
    errors = np.empty(resamples)
    for i in range(resamples):
        drawn = [rng.multinomial(len(sample), weights) / len(sample) for sample, weights in zip((a, b), bins)]
        errors[i] = np.abs(curve_difference(*drawn) - difference).max(initial=0.0)
    q = float(np.quantile(errors, level))
    return Gap(value, max(0.0, value - q), min(1.0, value + q), level)
