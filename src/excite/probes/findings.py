"""How a probe presents itself on a page: its panel, and findings about a run as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Series = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]  # steps, values

LARGE = 0.3  # relative change of a rank or a slope below which there is no finding
MAX_NAMED = 3  # layers named in one finding


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

    @property
    def fraction(self) -> float:
        """The change over the larger of the two sizes: between 0 and 1 for values of one sign."""
        size = max(abs(self.before), abs(self.now))
        return abs(self.now - self.before) / size if size > 0 else 0.0

    @property
    def ratio(self) -> float:
        """The last value over the extreme one."""
        return self.now / self.before if self.before else float("inf")


def finite(series: Series) -> Series:
    """Returns the finite values of a series, with their steps."""
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
    """Returns the part of a series from a step on."""
    kept = series[0] >= step
    return series[0][kept], series[1][kept]


def number(value: float) -> str:
    """Formats a value with three digits, or with all digits before the point."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.2g}"
        if abs(value) < 0.1 or abs(value) >= 10
        else f"{value:.2f}".rstrip("0").rstrip(".")
    )


def since(change: Change) -> str:
    """The step since which a change took place, in words."""
    return f"since step {change.since:,}" if change.since else "since the start"
