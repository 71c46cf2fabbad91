"""Subsampling of series for display, without losing extremes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
Series = tuple[Steps, Values]


def extremes(steps: Steps, values: Values, max_points: int = 1000) -> Series:
    """Minimum and maximum of each bin of equal length, and both ends: at most `max_points` (4 or more) points.

    The range of every bin is preserved. Values that are not finite are kept only where a bin has no others.
    """
    count = len(steps)
    if count <= max_points:
        return steps, values
    buckets = max(1, (max_points - 2) // 2)
    width = -(-count // buckets)
    padded = np.full(-(-count // width) * width, np.nan)
    padded[:count] = np.where(np.isfinite(values), values, np.nan)
    table = padded.reshape(-1, width)
    starts = np.arange(len(table)) * width
    low = starts + np.where(np.isnan(table), np.inf, table).argmin(1)
    high = starts + np.where(np.isnan(table), -np.inf, table).argmax(1)
    places = np.unique(np.concatenate([low, high, [0, count - 1]]))
    return steps[places], values[places]


def between(first: Steps, last: Steps, low: Values, mean: Values, high: Values) -> Series:
    """A curve through the minimum and the maximum of each bin, at its first and last step; minimum first where means rise."""
    rising = np.append(np.diff(mean), 0.0) >= 0
    pairs = np.stack([np.where(rising, low, high), np.where(rising, high, low)], 1)
    return np.stack([first, last], 1).reshape(-1), pairs.reshape(-1)


def within(steps: Steps, values: Values, low: float | None, high: float | None) -> Series:
    """The part of a curve from `low` to `high`, plus one point on either side so that lines reach the edges."""
    first = 0 if low is None else max(int(np.searchsorted(steps, low, side="left")) - 1, 0)
    last = len(steps) if high is None else int(np.searchsorted(steps, high, side="right")) + 1
    return steps[first:last], values[first:last]


@dataclass(frozen=True)
class Grid:
    """Values by row and step, for a heat map: z[row][column], NaN where nothing was measured."""

    rows: tuple[str, ...]
    steps: Steps
    z: Values


def grid(curves: Mapping[str, Series], max_columns: int = 240) -> Grid:
    """One row per curve, one column per bin of steps at which any was measured; means over a bin."""
    every = np.unique(np.concatenate([steps for steps, _ in curves.values()] or [np.empty(0, np.int64)]))
    width = max(1, -(-len(every) // max_columns))
    columns = every[::width]
    z = np.full((len(curves), len(columns)), np.nan)
    for row, (steps, values) in enumerate(curves.values()):
        fine = np.isfinite(values)
        cell = np.searchsorted(every, steps[fine]) // width
        counts = np.bincount(cell, minlength=len(columns))
        sums = np.bincount(cell, weights=values[fine], minlength=len(columns))
        z[row] = np.divide(sums, counts, out=np.full(len(columns), np.nan), where=counts > 0)
    return Grid(tuple(curves), columns, z)


def plain(values: npt.NDArray[Any] | Sequence[Any], digits: int = 6) -> list[Any]:
    """As a list for JSON: `digits` significant digits, None for values that are not finite."""
    array = np.asarray(values)
    if array.dtype.kind in "iu":
        return list(array.tolist())
    with np.errstate(all="ignore"):
        size = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(array))))
        rounded = np.where(np.isfinite(size) & (size > 0), np.round(array * size) / size, array)
    rounded = np.where(np.isfinite(rounded) | ~np.isfinite(array), rounded, array)
    fine = np.isfinite(array)
    listed: list[Any] = rounded.tolist()
    return listed if fine.all() else [value if ok else None for value, ok in zip(listed, fine.tolist())]
