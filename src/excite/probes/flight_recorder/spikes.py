"""When the loss spikes, and which series moved before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LOOKBACK = 50  # steps before a spike in which series may have moved first
QUIET = 100  # steps before those, from which it is known how much a series usually varies
_MIN_QUIET = 20
_SIGMAS, _BEYOND = 6.0, 1.5  # a series moved if it is 6 deviations off, and 1.5 times as far as ever in the quiet steps
_FLOOR = 0.02  # smallest deviation of the logarithm of a series: 2 %


@dataclass(frozen=True)
class SpikeRule:
    """When a loss counts as a spike.

    The smallest of the last `recent` losses exceeds the mean of the `past` losses before them by more than `least` and by more than
    `sigmas` of their standard deviations (after the alert of the Marin project, with windows in steps), or the last loss is not
    finite.

    Args:
        recent: Steps of the short window.
        past: Steps of the long window; at least half of it has to be known.
        sigmas: Number of standard deviations.
        least: Smallest rise that counts.

    Example:
        >>> from excite.probes.flight_recorder.spikes import SpikeRule
        >>> SpikeRule().limit([2.0] * 100 + [9.0] * 5)
        2.05
    """

    recent: int = 5
    past: int = 100
    sigmas: float = 6.0
    least: float = 0.05

    def limit(self, losses: Sequence[float]) -> float | None:
        """The threshold for the last losses; None while too few are known."""
        before = np.asarray(losses[: -self.recent][-self.past :], dtype=np.float64)
        before = before[np.isfinite(before)]
        if len(before) < max(2, self.past // 2):
            return None
        return float(before.mean() + max(self.least, self.sigmas * before.std()))

    def spikes(self, losses: Sequence[float]) -> bool:
        """Whether the loss spikes at the last of these."""
        if len(losses) and not math.isfinite(losses[-1]):
            return True
        limit = self.limit(losses)
        return limit is not None and min(losses[-self.recent :]) > limit


@dataclass(frozen=True)
class Mover:
    """A series that left its usual range.

    Attributes:
        quantity: "gradient", "update", "m", "v" or "residual".
        layer: Its layer; empty for the whole network.
        step: The first step at which it had.
        lead: Steps before the loss left its own.
        times: Its value at that step over the usual one.
    """

    quantity: str
    layer: str
    step: int
    lead: int
    times: float

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON."""
        return {
            "quantity": self.quantity,
            "layer": self.layer,
            "step": self.step,
            "lead": self.lead,
            "times": self.times,
        }


@dataclass
class Baseline:
    """How much series usually vary: medians and deviations of their logarithms in quiet steps.

    Args:
        table: Values (steps, series) of the quiet steps.
    """

    table: Floats
    center: Floats = field(init=False)
    scale: Floats = field(init=False)
    limit: Floats = field(init=False)

    def __post_init__(self) -> None:
        logs = _logs(self.table)
        self.center, deviation, worst = (np.full(self.table.shape[1], np.nan) for _ in range(3))
        known = np.isfinite(logs).any(0)
        if known.any():
            self.center[known] = np.nanmedian(logs[:, known], 0)
            off = np.abs(logs[:, known] - self.center[known])
            deviation[known], worst[known] = np.nanmedian(off, 0), np.nanmax(off, 0)
        self.scale = np.maximum(1.4826 * deviation, _FLOOR)
        self.limit = np.maximum(_SIGMAS, _BEYOND * worst / self.scale)

    def excess(self, table: Floats) -> Floats:
        """How far values (steps, series) are off, over what counts as moved; NaN where it is not known."""
        return np.asarray(np.abs(_logs(table) - self.center) / self.scale / self.limit)


def _logs(table: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(table > 0, np.log(np.abs(table)), np.nan)


def first_movers(
    steps: npt.NDArray[np.int64], losses: Floats, table: Floats, columns: Sequence[tuple[str, str]], at: int
) -> list[Mover]:
    """Series that left their usual range before a spike, the first one first.

    A series moved at the first of two steps in a row within the 50 steps before the spike at which the logarithm of its value is off its
    median by more than 6 deviations (1.4826 times the median absolute one, at least 2 %), and by more than 1.5 times as much as
    ever in the 100 steps before those.

    Args:
        steps: Steps (n,), ascending.
        losses: Losses (n,).
        table: Values (n, series); NaN where there is none.
        columns: (quantity, layer) of each series.
        at: Step of the spike.

    Returns:
        The movers, by step and then by how far off they are.
    """
    quiet = (steps < at - LOOKBACK) & (steps >= at - LOOKBACK - QUIET)
    if quiet.sum() < _MIN_QUIET:  # a short history: the first two thirds of it
        quiet = steps < at - (at - int(steps[0])) // 3
    near = (steps <= at) & ~quiet & (steps > at - LOOKBACK)
    if quiet.sum() < _MIN_QUIET or not near.any():
        return []
    everything = np.column_stack([losses, table])
    baseline = Baseline(everything[quiet])
    excess = np.nan_to_num(baseline.excess(everything[near]), nan=0.0, posinf=1e6)
    # What is not finite now and was before has moved, too.
    excess = np.where(~np.isfinite(everything[near]) & np.isfinite(baseline.center), 1e6, excess)
    times = steps[near]
    began = [_onset(column) for column in excess.T]
    loss_step = at if began[0] is None else int(times[began[0]])
    result = []
    for i, (quantity, layer) in enumerate(columns, start=1):
        if (start := began[i]) is None:
            continue
        value = everything[near][start, i]
        step = int(times[start])
        size = float(value / np.exp(baseline.center[i])) if np.isfinite(value) else math.inf
        result.append((step, -float(excess[start, i]), Mover(quantity, layer, step, loss_step - step, size)))
    return [mover for _, _, mover in sorted(result, key=lambda ranked: ranked[:2])]


def _onset(excess: Floats) -> int | None:
    """The first of two places in a row above 1; the last place needs none after it."""
    above = excess > 1
    both = above & np.append(above[1:], True)
    return int(np.flatnonzero(both)[0]) if both.any() else None
