"""Margin curves as arrays, their largest distance, and smoothing and thinning of series."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from excite.margin.gap import common_grid, curve_difference, frequencies


def curve(values: npt.NDArray[np.float64], widest: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Empirical distribution function: fraction of values that are at most x, for x from 0 to `widest`."""
    x, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    y = np.cumsum(counts) / values.size
    x, y = np.concatenate([[0.0], x]), np.concatenate([[float((values <= 0).mean())], y])
    return np.append(x, widest), np.append(y, y[-1])


def widest_gap(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """(x, lower value, upper value) where the distribution functions of `a` and `b` differ most: the KS distance."""
    grid = common_grid((a, b))
    fractions = [frequencies(np.searchsorted(grid, sample), len(grid)) for sample in (a, b)]
    difference = np.abs(curve_difference(*fractions))
    if not len(difference):
        return 0.0, 0.0, 0.0
    widest = int(np.argmax(difference))
    low, high = sorted(float(fraction[: widest + 1].sum()) for fraction in fractions)
    return float(grid[widest]), low, high


def expected_gap(n: int, m: int) -> float:
    """The gap that two samples of n and m points from one distribution show on average: √(π/2) ln 2 · √(1/n + 1/m).

    The mean of Kolmogorov's distribution. A measured gap of this size is no evidence of a difference.
    """
    return math.sqrt(math.pi / 2) * math.log(2) * math.sqrt(1 / n + 1 / m)


def smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Trailing mean over 2 % of the values."""
    width = max(1, len(values) // 50)
    sums = np.cumsum(np.concatenate([np.zeros(1), values]))
    starts = np.maximum(np.arange(1, len(values) + 1) - width, 0)
    means: npt.NDArray[np.float64] = (sums[1:] - sums[starts]) / (np.arange(1, len(values) + 1) - starts)
    return means


def thin(values: npt.NDArray[Any], max_points: int = 2000) -> npt.NDArray[Any]:
    """Every k-th value and the last one: at most about `max_points`."""
    if len(values) <= max_points:
        return values
    return np.append(values[:: -(-len(values) // max_points)], values[-1])
