"""Outcome of a run: margins on training and test data, their gap, accuracy, and whether it diverged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from excite.margin import Margins
from excite.margin.gap import Gap, chance_gap, critical_value
from excite.report.collect import fractions, not_fractions
from excite.report.curves import widest_gap
from excite.report.verdict.units import InputUnit, short, unit_of
from excite.runs.reader import Overview

Array = npt.NDArray[np.float64]
PROBE = "margin_gap"  # name of the probe that measures both parts while a network trains
SUMMARY = tuple(
    f"{PROBE}/{name}"
    for name in ("median/train", "median/test", "low/train", "low/test", "accuracy/train", "accuracy/test", "gap", "chance")
)  # fmt: skip
TEST_MEDIAN = f"{PROBE}/median/test"
EXPLODED = 10.0  # times the loss at the start, above which a training has diverged
SMALLEST = 0.1  # a loss that starts below it is taken to start there
_LEVEL = 0.95


@dataclass(frozen=True)
class Median:
    """A median margin with a 95 % interval over the choice of points (and of runs, if there are several)."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def error(self) -> float:
        """Standard error; infinite if it is not known."""
        width = (self.high - self.low) / (2 * NormalDist().inv_cdf((1 + _LEVEL) / 2))
        return width if math.isfinite(width) else math.inf


@dataclass(frozen=True)
class RunOutcome:
    """Robustness of one run, or of the runs of one variant.

    Attributes:
        label: Name on the page.
        status: "running", "done", "failed", "stopped", "stale" or "diverged".
        reason: Why it failed, or how it diverged.
        step: The last step.
        medians: Median margins by part, "train" and "test"; "batch" for a fixed batch of the probe `Margin`.
        points: Number of points by part, where it is known.
        accuracy: Accuracy by part.
        gap: Distance between the margin curves of both parts, with a 95 % interval; None without both.
        chance: The gap that two samples of these sizes from one distribution exceed once in 20.
        widest: Where the curves differ most: the size, and the fractions of training and of test points misclassified within
            it; None if only the gap is known.
        norm: "inf" or "2".
        unit: Range of the inputs, or None.
        verified: Whether the search for margins was verified; None if that was not requested.
        flags: Reasons not to trust the margins.
        final: Margins are those of the trained network, not of the last measurement while it trains.
        measurable: The run has a checkpoint, so that `excite margins` can measure it.
        classes: Number of classes, or None if it is not known.
        note: A sentence on values that were left out; may be empty.
        discrete: Inputs are whole numbers such as token ids, which have no margin.
    """

    label: str = ""
    status: str = "done"
    reason: str | None = None
    step: int | None = None
    medians: Mapping[str, Median] = field(default_factory=dict)
    points: Mapping[str, int] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    gap: Gap | None = None
    chance: float | None = None
    widest: tuple[float, float, float] | None = None
    norm: str = "inf"
    unit: InputUnit | None = None
    verified: bool | None = None
    flags: tuple[str, ...] = ()
    final: bool = False
    measurable: bool = False
    classes: int | None = None
    note: str = ""
    discrete: bool = False

    @property
    def margin(self) -> float | None:
        """Median margin on test data, or None."""
        return self.medians["test"].value if "test" in self.medians else None

    @property
    def margin_text(self) -> str:
        """The same in the unit of the data; empty if it was not measured."""
        return "" if self.margin is None else short(self.margin, self.norm, self.unit)


def from_margins(
    margins: Mapping[str, Margins | Sequence[Margins]], accuracy: Mapping[str, float] | None = None, **more: Any
) -> RunOutcome:
    """The outcome that measured margins show.

    Args:
        margins: By part, "train" and "test": margins, or those of several runs of one variant.
        accuracy: Accuracy by part; by default the fraction of points with a margin above 0.
        **more: Further fields of `RunOutcome`.

    Returns:
        The outcome.
    """
    by_split = {
        split: [margins_of_run] if isinstance(margins_of_run, Margins) else list(margins_of_run)
        for split, margins_of_run in margins.items()
    }
    by_split = {split: result for split, result in by_split.items() if result}
    values = {
        split: [np.asarray(margins_of_run.values, dtype=np.float64) for margins_of_run in result]
        for split, result in by_split.items()
    }
    every = [margins_of_run for result in by_split.values() for margins_of_run in result]
    if not every:
        return RunOutcome(accuracy=dict(accuracy or {}), **more)
    pooled = {split: np.concatenate(value) for split, value in values.items()}
    points = {split: min(map(len, value)) for split, value in values.items()}  # runs share their data: of one run
    gap = chance = widest = None
    if {"train", "test"} <= pooled.keys():
        at, low, high = widest_gap(pooled["train"], pooled["test"])
        widest = at, float((pooled["train"] <= at).mean()), float((pooled["test"] <= at).mean())
        chance = chance_gap(points["train"], points["test"])
        gap = gap_interval(high - low, chance)
    flags = tuple(dict.fromkeys(flag for margins_of_run in every for flag in margins_of_run.flags))
    known = {split: float((result > 0).mean()) for split, result in pooled.items()} | dict(accuracy or {})
    return RunOutcome(
        medians={split: median_of(value) for split, value in values.items()}, points=points, accuracy=known, gap=gap,
        chance=chance, widest=widest, norm=every[0].norm, unit=unit_of(every[0]), flags=flags, final=True,
        verified=None if any(margins_of_run.evidence is None for margins_of_run in every) else not flags, **more,
    )  # fmt: skip


def from_latest(latest: Mapping[str, float], **more: Any) -> RunOutcome:
    """The outcome that the last values of the metrics show, for a run that still trains or has no stored margins."""
    result = {name: value for name, value in latest.items() if not math.isnan(value)}
    gap, chance = result.get(f"{PROBE}/gap"), result.get(f"{PROBE}/chance")
    medians, points = {}, {}
    for split in ("train", "test"):
        if f"{PROBE}/median/{split}" in result:
            medians[split] = _median_of_quantiles(
                result[f"{PROBE}/median/{split}"], result.get(f"{PROBE}/low/{split}"), chance
            )
            if chance:
                points[split] = round(_points(chance))
    if not medians and "margin/median" in result:
        medians["batch"] = Median(result["margin/median"])
    accuracy = {split: result[key] for split in ("train", "test") if (key := f"{PROBE}/accuracy/{split}") in result}
    note = more.pop("note", "") or not_fractions(accuracy)
    return replace(
        RunOutcome(medians=medians, points=points, accuracy=fractions(accuracy), chance=chance, note=note),
        gap=None if gap is None or not chance else gap_interval(gap, chance),
        **more,
    )


def _points(chance: float) -> float:
    """Number of points per part with this chance level, if both have the same."""
    return 2 * (critical_value(_LEVEL) / chance) ** 2


def gap_interval(value: float, chance: float) -> Gap:
    """The gap with a 95 % interval: the whole difference of two empirical curves errs by at most the chance level."""
    return Gap(value, max(0.0, value - chance), min(1.0, value + chance), _LEVEL)


def median_of(samples: Sequence[Array]) -> Median:
    """Median of all samples together; the interval from order statistics of the points, and from the spread of the runs.

    The number of points below the true median is binomial, so that two order statistics enclose it with probability 0.95.
    Runs of one variant share their points: the interval is that of one run, or of the medians of the runs if that is wider.
    """
    value = float(np.median(np.concatenate(samples)))
    ordered = np.sort(samples[0])
    n, z = len(ordered), NormalDist().inv_cdf((1 + _LEVEL) / 2)
    half = z * math.sqrt(n) / 2
    below, above = math.floor(n / 2 - half) - 1, math.ceil(n / 2 + half)
    low = float(ordered[below]) if below >= 0 else 0.0
    high = float(ordered[above]) if above < n else math.inf
    if len(samples) > 1:
        medians = np.array([np.median(sample) for sample in samples])
        if not np.isfinite(medians).all():
            return Median(value, low, high)
        half_width = 1.25 * z * float(medians.std(ddof=1)) / math.sqrt(len(medians))  # 1.25: few runs
        middle = float(np.median(samples[0]))
        low, high = value - max(middle - low, half_width), value + max(high - middle, half_width)
    return Median(value, max(0.0, low), high)


def _median_of_quantiles(median: float, low: float | None, chance: float | None) -> Median:
    """With the interval of a normal sample that has this median and this lowest tenth; its size from the chance level."""
    if low is None or not chance or not math.isfinite(median):
        return Median(median)
    deviation = max(median - low, 0.0) / NormalDist().inv_cdf(0.9)
    n = _points(chance)
    half = NormalDist().inv_cdf((1 + _LEVEL) / 2) * 1.2533 * deviation / math.sqrt(max(n, 1.0))
    return Median(median, max(0.0, median - half), median + half)


def hardly(classes: int) -> float:
    """Accuracy below which a network is hardly better than chance: a fifth of the way from chance to 1."""
    return 1 / classes + 0.2 * (1 - 1 / classes)


def divergence(
    first: Sequence[float], last: Sequence[float], running: bool = False, margin: float | None = None
) -> str:
    """How a training diverged, from the first and the last values of its loss; empty if it did not.

    It did if the last value is not finite (three in a row while it runs: mixed precision skips single steps), if the
    median of the last values is more than ten times that of the first, or if the last three quarters of them are more than a hundred times
    the very first one, ten times where the first values hold one 1,000 times as large, or where the median margin of test points is 0,
    so that most of them are misclassified: with a learning rate far too high, the second
    step diverges, and the loss may settle far below that peak; where the first batch was merely an easy one, the network has learned something. That factor is larger where the last values differ among themselves
    by more, as the losses of single samples do. What is compared with counts as 0.1 if it is smaller: a loss that
    starts near zero, such as that of a student that starts as its teacher or of an easy first batch, has no scale to rise from.
    """
    begun, ended = (np.asarray(values, dtype=np.float64) for values in (first, last))
    if not len(ended):
        return ""
    fine = np.flatnonzero(np.isfinite(ended))
    num_nonfinite = len(ended) - 1 - int(fine[-1]) if len(fine) else len(ended)
    if num_nonfinite >= (min(3, len(ended)) if running else 1):
        return "the loss is not a finite number"
    few = max(1, len(begun) // 4) if len(begun) == len(ended) < 20 else len(begun)  # short: the same values in both
    start, end = (
        float(np.median(v[np.isfinite(v)])) if np.isfinite(v).any() else 0.0 for v in (begun[:few], ended[-few:])
    )
    if start > 0 and end > EXPLODED * max(start, SMALLEST):
        return f"the loss rose from {start:.3g} to {end:.3g}"
    settled = ended[len(ended) // 4 :]  # of a short run the values before are those of its start
    settled = settled[np.isfinite(settled)]
    minimum = float(np.min(settled, initial=math.inf))
    peak = float(np.max(begun[np.isfinite(begun)], initial=0.0))
    if begun.size and 0 < begun[0] < math.inf:  # it may have risen within the first steps
        initial = max(float(begun[0]), SMALLEST)
        final_ratio = float(np.max(settled)) / minimum if 0 < minimum < math.inf else math.inf
        factor = EXPLODED if peak > EXPLODED**3 * initial or margin == 0 else EXPLODED**2
        if math.inf > minimum > max(factor, final_ratio) * initial:
            return f"the loss rose from {begun[0]:.3g} to {end:.3g}"
    return ""


def displayed_status(status: str, reason: str | None, metrics: Overview) -> tuple[str, str | None]:
    """Status and reason of a run on a page: "diverged" replaces any other status of a run that did.

    Args:
        status: Status in run.json.
        reason: Reason in run.json.
        metrics: The first and the last values of its loss, and the last median margin of test points if it was measured.
    """
    margin = metrics.latest.get(TEST_MEDIAN)
    divergence_text = divergence(metrics.loss_first, metrics.loss_last, running=status == "running", margin=margin)
    if not divergence_text:
        return status, reason
    since = (
        f" since step {metrics.broken_at:,}" if metrics.broken_at is not None and "finite" in divergence_text else ""
    )
    return "diverged", f"{divergence_text}{since}"
