"""Intervals of a mean effect over seeds, or over seeds and the images that all of them share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]
LEVEL = 0.95  # of intervals; claims are decided at 1 − LEVEL


@dataclass(frozen=True)
class MeanEffect:
    """A mean with its standard error.

    Args:
        mean: The mean effect over seeds.
        error: Its standard error; NaN where it is not known: a single seed, or an effect that is not finite.
        freedom: Degrees of freedom of the standard error.
        by_images: The part of error² that comes from the images, which more seeds do not reduce; None where images were not resampled.
    """

    mean: float
    error: float
    freedom: float
    by_images: float | None = None

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """mean ± t · error; unbounded where the error is not known, as where few seeds happen to show the same number."""
        if math.isnan(self.error) or (self.error == 0 and self._by_sign > 1 - level):
            return -math.inf, math.inf
        half_width = float(stats.t.ppf((1 + level) / 2, self.freedom)) * self.error if self.error > 0 else 0.0
        return self.mean - half_width, self.mean + half_width

    @property
    def _by_sign(self) -> float:
        """p-value of the sign test, for n seeds on the same side of a threshold: 2^(1 − n)."""
        return float(2.0**-self.freedom)

    def p_value(self, threshold: float) -> float:
        """Two-sided p-value of the mean against a threshold: at most 5 % where the 95 % interval leaves the threshold out.

        Where all seeds show the same number the spread is not known, and only their side counts: the sign test.
        """
        if math.isnan(self.error):
            return 1.0
        distance = abs(self.mean - threshold)
        if self.error == 0:
            return self._by_sign if distance > 0 else 1.0
        return float(2 * stats.t.sf(distance / self.error, self.freedom))


def over_seeds(effects: Array) -> MeanEffect:
    """The mean over seeds, with s / √n and n − 1 degrees of freedom."""
    n = len(effects)
    if n < 2 or not np.isfinite(effects).all():
        return MeanEffect(float(effects.mean()), math.nan, math.nan)
    return MeanEffect(float(effects.mean()), float(effects.std(ddof=1)) / math.sqrt(n), n - 1)


def over_seeds_and_images(effects: Array, resampled: Array) -> MeanEffect:
    """The mean over seeds, with an error that covers other seeds and other images.

    All seeds are measured on the same images, so that their differences do not show what other images would give. Resampling
    the images shows it. An effect is a mean, plus what its seed adds, what the images add, and what both add together. The
    variance over seeds holds the first and the last part, the variance over resamples of the mean holds the second and the last:
    the last is counted once (Cameron, Gelbach and Miller 2011). Degrees of freedom are those of Welch and Satterthwaite.

    Args:
        effects: The effect of each seed, on the images as they are.
        resampled: (seeds, resamples): the effect of each seed on images drawn with replacement, the same images for all seeds.

    Returns:
        The estimate; `over_seeds` where resampled effects are not finite.
    """
    seeds = over_seeds(effects)
    if math.isnan(seeds.error) or resampled.shape[1] < 2 or not np.isfinite(resampled).all():
        return seeds
    count, draws = resampled.shape
    by_image = float(resampled.mean(0).var(ddof=1))
    own = resampled - resampled.mean(0)  # of the seed: what the same images do to all seeds is taken out
    both = float(own.var(1, ddof=1).sum()) / (count * (count - 1))
    by_seed = seeds.error**2
    total = max(by_seed + by_image - both, by_seed, by_image)
    if total == 0:
        return replace(seeds, by_images=0.0)
    freedom = total**2 / (by_seed**2 / (count - 1) + by_image**2 / (draws - 1))
    return MeanEffect(seeds.mean, math.sqrt(total), freedom, total - by_seed)


def resample(points: int, draws: int, stream: int = 0) -> npt.NDArray[np.int64]:
    """(draws, points): positions drawn with replacement, always the same for the same arguments."""
    return np.random.default_rng((points, stream)).integers(points, size=(draws, points))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of m p-values times m − k + 1, not below the one before, at most 1."""
    order = np.argsort(p, kind="stable")
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - rank) * p[at]))
        adjusted[at] = largest
    return adjusted
