"""Warnings before a loss spikes: how unusual a series is, and what a threshold on that would have warned of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from excite.probes.flight_recorder.spikes import Floats

if TYPE_CHECKING:
    pass
QUANTITIES = ("gradient", "update", "m", "v", "residual")
ANY, LOSS = "any", "loss"
_PAST, _GAP, _ROWS = 100, 10, 3  # steps of the baseline, between it and now, and steps in a row that have to be unusual
_FLOOR = 0.02  # smallest deviation of the logarithm of a series: 2 %
AHEAD = 50  # steps before the loss leaves its range in which a warning counts
WINDOW, LEVEL = (
    100,
    0.99,
)  # steps of a quiet window, and the quantile of its largest value: one false alarm in 10,000 steps


def unusualness(table: Floats) -> Floats:
    """How far series are above their usual size, in deviations, three steps in a row: (steps, series); 0 where not known.

    The usual size at a step is the median of the logarithms of the 100 values that ended 10 steps before, a deviation 1.4826 times the
    median absolute one, at least 2 %. What was finite before and is not finite now is infinitely far.
    """
    finite = np.isfinite(table) & (table > 0)
    logs = np.log(np.where(finite, table, 1.0))
    z = np.zeros(table.shape)
    begin = _PAST + _GAP
    if len(table) > begin:
        windows = sliding_window_view(logs, _PAST, axis=0)[: len(table) - begin]  # (steps, series, 100)
        center = np.median(windows, 2)
        scale = np.maximum(1.4826 * np.median(np.abs(windows - center[:, :, None]), 2), _FLOOR)
        known = sliding_window_view(finite, _PAST, axis=0)[: len(table) - begin].all(2)
        z[begin:] = np.where(known, (logs[begin:] - center) / scale, 0.0)
        z[begin:][known & ~np.isfinite(table[begin:])] = np.inf
    rows = [np.vstack([np.zeros((k, table.shape[1])), z[: len(z) - k]]) for k in range(_ROWS)]
    return np.asarray(np.min(rows, 0))


def loss_onset(losses: Floats, step: int, limit: float | None) -> int:
    """The step (from 1 on) at which the stretch of losses above the limit began that a spike was reported in."""
    at = step - 1
    high = ~np.isfinite(losses) | (losses > (math.inf if limit is None else limit))
    while at > 0 and high[at - 1]:
        at -= 1
    return at + 1


@dataclass(frozen=True)
class SpikeRun:
    """One run as warnings are judged on it."""

    statistics: Mapping[str, Floats]
    onset: int | None

    @property
    def quiet(self) -> int:
        """Steps in which a warning is a false alarm: all but the 50 before a spike, and what comes after."""
        return len(self.statistics[ANY]) if self.onset is None else max(0, self.onset - 1 - AHEAD)

    def windows(self, name: str) -> list[float]:
        """The largest value in each quiet window of 100 steps in which a baseline is known."""
        series = self.statistics[name][_PAST + _GAP + _ROWS : self.quiet]
        return [float(series[i : i + WINDOW].max()) for i in range(0, len(series) - WINDOW + 1, WINDOW)]

    def lead(self, name: str, threshold: float) -> float:
        """Steps from the first warning within 50 steps before the loss left its range to that step; NaN if there is none."""
        if self.onset is None:
            return math.nan
        begin = max(0, self.onset - 1 - AHEAD)
        above = np.flatnonzero(self.statistics[name][begin : self.onset - 1] > threshold)
        return float(self.onset - 1 - begin - above[0]) if len(above) else math.nan

    def false_alarms(self, name: str, threshold: float) -> int:
        """Warnings in quiet steps; those within 50 steps of one another count once."""
        alarms, last = 0, -AHEAD
        for step in np.flatnonzero(self.statistics[name][: self.quiet] > threshold).tolist():
            alarms += step - last >= AHEAD
            last = step
        return alarms


def calibrate(runs: Sequence[SpikeRun]) -> dict[str, float]:
    """The threshold of each statistic: the 99 % quantile of its largest value in quiet windows of 100 steps."""
    thresholds = {}
    for name in (*QUANTITIES, ANY, LOSS):
        largest = [value for run in runs for value in run.windows(name)]
        thresholds[name] = float(np.quantile(largest, LEVEL, method="higher")) if largest else math.inf
    return thresholds


def choose(runs: Sequence[SpikeRun], thresholds: Mapping[str, float]) -> str:
    """The statistic that warned before most spikes of these runs; among equals the one with the longer leads."""

    def worth(name: str) -> tuple[float, float]:
        leads = np.array([run.lead(name, thresholds[name]) for run in runs if run.onset is not None])
        hits = np.isfinite(leads)
        return float(hits.sum()), float(leads[hits].sum())

    return max((ANY, *QUANTITIES), key=worth)
