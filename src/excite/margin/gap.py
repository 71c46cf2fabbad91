"""The largest vertical distance between two margin curves, with an interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gap:
    """sup over ε of |F(ε) − G(ε)|, where F and G are the fractions misclassified within ε; converts to float.

    [low, high] holds the gap of the two distributions the points were drawn from, with probability at least `level`.
    """

    value: float
    low: float
    high: float
    level: float = 0.95

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.level:.0%} interval {self.low:.3f} to {self.high:.3f})"


def ks_gap(a: Array, b: Array, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Gap:
    """The two-sample Kolmogorov–Smirnov distance of the margins a (n,) and b (m,); a censored margin is +inf.

    The interval: resampling the distance itself would be biased upwards, most of all where the curves agree (the
    distance of two samples of one distribution is never 0). Instead the *difference of the curves* is resampled:
        T = sup |(F* − G*) − (F − G)|,
    whose upper quantile q at `level` bounds the error of the whole difference at once, hence of its largest absolute
    value: [value − q, value + q], cut to [0, 1]. Conservative; it contains 0 whenever the curves may well be the same.
    """
    points = np.unique(np.concatenate([a, b]))
    points = points[np.isfinite(points)]
    if not len(points):
        return Gap(0.0, 0.0, 0.0, level)
    # bin k holds the margins equal to points[k]; the last one those that are never broken
    bins = [np.bincount(np.searchsorted(points, sample), minlength=len(points) + 1) / len(sample) for sample in (a, b)]
    difference = np.cumsum(bins[0] - bins[1])[:-1]
    value = float(np.abs(difference).max())
    rng = np.random.default_rng(seed)
    errors = np.empty(resamples)
    for i in range(resamples):
        drawn = [rng.multinomial(len(sample), weights) / len(sample) for sample, weights in zip((a, b), bins)]
        errors[i] = np.abs(np.cumsum(drawn[0] - drawn[1])[:-1] - difference).max()
    q = float(np.quantile(errors, level))
    return Gap(value, max(0.0, value - q), min(1.0, value + q), level)
