"""How a probe presents itself on a page: its panel, and findings about a run as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Series = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # steps, values

LARGE = 0.3  # relative change of a rank or a slope below which there is no finding
MIN_VALUES = 4  # of a series, below which its noise is not known and no change is stated
_NOISE = 8.0  # times the noise that a change has to exceed; more for few values
_LEARNED = 0.8  # of the fall of the loss, after which a network counts as trained
MAX_NAMED = 3  # layers named in one finding
ANSWERS = "rank/answers"  # classes between which a model of sequences decides, one answer for each sequence
_SOLVED = 0.9  # of the loss at the start, and of that by chance, below which a network learns to answer


@dataclass(frozen=True)
class Panel:
    """How the metrics of a probe are drawn.

    Args:
        id: Identifier of the panel in links and settings. Probes with the same id share a panel.
        title: Heading; empty to join a panel that another probe describes.
        about: What is drawn and how to read it, in two or three sentences.
        labels: (quantity, label) of the quantities to show first, in their order.
        order: Position on the page, ascending.
        log: Draw on a logarithmic axis.
        heatmap: Draw also as a heat map over layers and steps.
        hidden: Quantities that are not drawn.
        probes: Names of the probes whose metrics are drawn, besides the one that has this panel.
        docs: Section of the documentation that explains it, such as "richness.md#quantities-of-a-layer".
    """

    id: str
    title: str = ""
    about: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    order: int = 1000
    log: bool = False
    heatmap: bool = False
    hidden: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    docs: str = ""


@dataclass(frozen=True)
class Finding:
    """One sentence about a run.

    Args:
        kind: "warning" for what needs attention, "good" or "note" otherwise.
        text: The sentence, ending in a full stop.
        action: What to do about it, as a sentence; may be empty.
        panel: Id of the panel that shows it; by default that of the probe.
        docs: Section of the documentation; by default that of the panel.
    """

    kind: Literal["warning", "good", "note"]
    text: str
    action: str = ""
    panel: str = ""
    docs: str = ""


class MetricSeries(Protocol):
    """All metrics of a run by name, as passed to `Probe.findings`."""

    def __getitem__(self, name: str) -> Series:
        """Steps and values of one metric; empty if it was not measured."""

    def layers(self, key: str) -> Mapping[str, Series]:
        """Series `key/layer` by layer, in the order of execution."""

    def of(self, key: str) -> Mapping[str, Series]:
        """The same, with `key` itself as the layer ""."""


@dataclass(frozen=True)
class Change:
    """From the largest (or smallest) value so far to the last one.

    `since` is the last step at which nine tenths of the way were still ahead.
    """

    before: float
    now: float
    since: int
    noise: float = 0.0  # standard deviation of one value, from the variation of the series from step to step
    count: int = 0  # values it was estimated from

    @property
    def clear(self) -> bool:
        """Whether the change exceeds its noise.

        The highest of n values of pure noise lies some 5 standard deviations above the last one in 1 % of cases, and the
        noise itself is an estimate: 8 (1 + 3/n) of them keep false findings below 1 % (`tests/probes/test_findings.py`).
        """
        return self.count >= MIN_VALUES and abs(self.now - self.before) > _NOISE * (1 + 3 / self.count) * self.noise

    @property
    def large(self) -> bool:
        """Whether it exceeds its noise and is larger than `LARGE`."""
        return self.clear and self.fraction > LARGE

    @property
    def fraction(self) -> float:
        """The change over the larger of the two sizes: between 0 and 1 for values of one sign."""
        size = max(abs(self.before), abs(self.now))
        return abs(self.now - self.before) / size if size > 0 else 0.0

    @property
    def ratio(self) -> float:
        """The last value over the extreme one."""
        return self.now / self.before if self.before else float("inf")


def with_role(name: str, roles: Mapping[str, str]) -> str:
    """The name of a layer, head or law with what it does in a transformer: "h.3.attn/head5 (layer 3, head 5)".

    Args:
        name: The name, as in metrics.
        roles: Roles by name (`Wiring.roles`); a name without one is returned as it is.
    """
    role = roles.get(name)
    return f"{name} ({role})" if role else name


def finite(series: Series) -> Series:
    """Returns the finite values of a series, with their steps."""
    fine = np.isfinite(series[1])
    return series[0][fine], series[1][fine]


def binned_median(series: Series) -> Series:
    """Medians of up to 50 intervals of equal length: one outlier changes nothing. Steps are the last of each interval."""
    steps, values = finite(series)
    width = len(steps) // 50
    if width < 3:  # few values: as they are
        return steps, values
    start = len(steps) % width
    table = values[start:].reshape(-1, width)
    return steps[start:].reshape(-1, width)[:, -1], np.median(table, 1)


def noise(values: npt.NDArray[np.float64]) -> float:
    """Standard deviation of one value, from the variation from step to step; infinite for fewer than four values.

    The smaller of two estimates by the median: from first differences, which a jump does not change, and from second
    differences, which a steady trend does not change.
    """
    if len(values) < MIN_VALUES:
        return float("inf")
    first, second = (float(np.median(np.abs(np.diff(values, n=order)))) for order in (1, 2))
    return 1.4826 * min(first / 2**0.5, second / 6**0.5)


def fall(series: Series) -> Change | None:
    """From the highest value to now; None without two values. Whether it exceeds its noise is `Change.clear`."""
    steps, values = binned_median(series)
    if len(steps) < 2:
        return None
    peak, last = float(values.max()), float(values[-1])
    since = int(steps[np.flatnonzero(values >= peak - 0.1 * (peak - last))[-1]])
    return Change(peak, last, since, noise(values), len(values))


def rise(series: Series) -> Change | None:
    """From the lowest value to now; None without two values."""
    fallen = fall((series[0], -series[1]))
    return None if fallen is None else replace(fallen, before=-fallen.before, now=-fallen.now)


def learned(history: MetricSeries) -> int:
    """The first step at which the loss had covered 80 % of its fall; 0 if it did not fall.

    Slopes and margins of a network that has not learned yet are no baseline: they change because it learns.
    """
    steps, values = binned_median(history["loss/step"])
    if len(steps) < 2:
        return 0
    start, low = float(values[0]), float(values.min())
    return int(steps[np.flatnonzero(values <= start - _LEARNED * (start - low))[0]]) if low < start else 0


def needed_rank(answers: float | None, first_loss: float, last_loss: float) -> float | None:
    """Effective rank below which layers of a model with one answer for each sequence have lost what the answers need.

    Trained to the end, features collapse onto one mean for each of m classes, which span m − 1 directions (neural collapse, Papyan,
    Han and Donoho 2020): ranks that fall towards m − 1 while the loss falls are no damage. Means of unequal size have a smaller
    effective rank; half of m − 1 is allowed.

    Args:
        answers: m; None for other models.
        first_loss: The loss at the start.
        last_loss: The loss now.

    Returns:
        (m − 1)/2 if the loss is below what it was, and below the cross-entropy log m of answers by chance, by a tenth; else None: then
        a fall of the rank is one.
    """
    if answers is None or not 0 <= last_loss < _SOLVED * min(first_loss, math.log(max(2.0, answers))):
        return None
    return (answers - 1) / 2


def answered_rank(history: MetricSeries) -> float | None:
    """`needed_rank` at the end of a run."""
    answers, losses = finite(history[ANSWERS])[1], binned_median(history["loss/step"])[1]
    if not len(answers) or len(losses) < 2:
        return None
    return needed_rank(float(answers[-1]), float(losses[0]), float(losses[-1]))


def first_nonfinite(series: Series) -> int | None:
    """The first step whose value is not a finite number."""
    nonfinite = np.flatnonzero(~np.isfinite(series[1]))
    return int(series[0][nonfinite[0]]) if len(nonfinite) else None


def since_step(series: Series, step: int) -> Series:
    """Returns the part of a series from a step on."""
    retained = series[0] >= step
    return series[0][retained], series[1][retained]


def number(value: float) -> str:
    """Formats a value with three digits, or with all digits before the point; with an exponent from 10⁹ on."""
    return (
        f"{value:.1e}"
        if abs(value) >= 1e9
        else f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.2g}"
        if abs(value) < 0.1 or abs(value) >= 10
        else f"{value:.2f}".rstrip("0").rstrip(".")
    )


def since(change: Change) -> str:
    """The step since which a change took place, in words."""
    return f"since step {change.since:,}" if change.since else "since the start"
