"""What changed in a curve, and since when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from excite.report.subsample import Series


@dataclass(frozen=True)
class Change:
    """From the largest (or smallest) value so far to now. `since` is the last step at which nine tenths of the way were
    still ahead."""

    before: float
    now: float
    since: int

    @property
    def fraction(self) -> float:
        """The change over the larger of the two sizes: between 0 and 1 for values of one sign."""
        size = max(abs(self.before), abs(self.now))
        return abs(self.now - self.before) / size if size > 0 else 0.0

    @property
    def ratio(self) -> float:
        return self.now / self.before if self.before else float("inf")


def finite(series: Series) -> Series:
    fine = np.isfinite(series[1])
    return series[0][fine], series[1][fine]


def binned_median(series: Series) -> Series:
    """Medians of up to 50 stretches of equal length: one outlier changes nothing. Steps are the last of each stretch."""
    steps, values = finite(series)
    width = len(steps) // 50
    if width < 3:  # few values: as they are
        return steps, values
    start = len(steps) % width
    table = values[start:].reshape(-1, width)
    return steps[start:].reshape(-1, width)[:, -1], np.median(table, 1)


def fall(series: Series) -> Change | None:
    """From the highest value to now; None without two values."""
    steps, values = binned_median(series)
    if len(steps) < 2:
        return None
    peak, now = float(values.max()), float(values[-1])
    return Change(peak, now, int(steps[np.flatnonzero(values >= peak - 0.1 * (peak - now))[-1]]))


def rise(series: Series) -> Change | None:
    """From the lowest value to now; None without two values."""
    found = fall((series[0], -series[1]))
    return None if found is None else Change(-found.before, -found.now, found.since)


def first_nonfinite(series: Series) -> int | None:
    """The first step whose value is not a finite number."""
    broken = np.flatnonzero(~np.isfinite(series[1]))
    return int(series[0][broken[0]]) if len(broken) else None


def since_step(series: Series, step: int) -> Series:
    kept = series[0] >= step
    return series[0][kept], series[1][kept]
