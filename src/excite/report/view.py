"""The data that a page draws, as JSON: the same for the live page and for the file that `excite report` writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from excite.report.alerts import grouped
from excite.report.curves import smooth
from excite.report.history import MetricHistory
from excite.report.narrative import Finding
from excite.report.narrative import findings as history_findings
from excite.report.panels import PANELS, WHOLE, PanelView, Quantity, anchor, make_panels
from excite.report.panels import select as select_names
from excite.report.subsample import Series, between, extremes, grid, plain, within
from excite.report.verdict.links import docs_url
from excite.runs.reader import MetricsReader

POINTS, COLUMNS = 1000, 240  # at most, of a curve and of a heat map
BUDGET = 12_000  # points of all curves of one quantity together
MAX_METRICS = 2000  # on a live page; the others are found by a part of their name


@dataclass(frozen=True)
class RunView:
    """One run on a page. Runs of one `group` have one colour; quantities by layer are shown for the `first` of a group."""

    metrics_reader: MetricsReader
    label: str
    group: int
    first: bool = True
    order: tuple[str, ...] = ()  # layers as they are executed
    roles: Mapping[str, str] = field(default_factory=dict)  # of layers, heads and laws, by name


def select(runs: Sequence[RunView], limit: int, contains: str = "") -> tuple[set[str], int]:
    """At most `limit` metrics of these runs whose name contains `contains`, and how many are left out."""
    return select_names(_names(runs), limit, _order(runs), contains)


def describe(runs: Sequence[RunView], names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The panels of a page: their quantities and layers, over all runs. `names`: only of these metrics."""
    roles = next((run.roles for run in runs if run.roles), {})
    return [_described(panel, roles) for panel in make_panels(_names(runs) if names is None else names, _order(runs))]


def _names(runs: Sequence[RunView]) -> set[str]:
    return {name for run in runs for name in run.metrics_reader.names()}


def _described(panel: PanelView, roles: Mapping[str, str]) -> dict[str, Any]:
    layers = dict.fromkeys(layer for quantity in panel.quantities for layer in quantity.layers)
    return {
        "id": panel.panel.id,
        "title": panel.panel.title,
        "about": panel.panel.about,
        "log": panel.panel.log,
        "map": panel.panel.heatmap,
        "known": panel.panel in PANELS,
        "quantities": [{"key": q.key, "name": q.name, "layers": list(q.layers)} for q in panel.quantities],
        "roles": {layer: role for layer in layers if (role := _role(layer, roles))},
    }


def _role(layer: str, roles: Mapping[str, str]) -> str:
    """What a layer does; of a layer behind a quantity, as in the recorder's update/LAYER, both."""
    first, _, inner = layer.partition("/")
    return roles.get(layer) or (f"{first}, {roles[inner]}" if inner in roles else "")


def draw(
    runs: Sequence[RunView],
    keys: Collection[str],
    points: int = POINTS,
    low: float | None = None,
    high: float | None = None,
    rough: bool = False,
    budget: int = BUDGET,
    names: Collection[str] | None = None,
) -> dict[str, Any]:
    """The curves of the quantities `keys`, thinned, and heat maps where the panel has one; steps from `low` to `high`.

    `rough`: at once, from a few values of every series that was not read before. `names`: only of these metrics.
    """
    names_by_run = [set(run.metrics_reader.names()) for run in runs]
    result: dict[str, Any] = {}
    for panel in make_panels(set().union(*names_by_run) if names is None else names, _order(runs)):
        for quantity in panel.quantities:
            if quantity.key in keys:
                chosen = _Chosen(runs, names_by_run, panel, quantity, points, low, high, rough, budget)
                result[quantity.key] = {"curves": chosen.curves(), "maps": chosen.maps()}
    return result


@dataclass
class _Chosen:
    """One quantity of one panel, of all runs, between two steps."""

    runs: Sequence[RunView]
    names: Sequence[Collection[str]]  # of each run
    panel: PanelView
    quantity: Quantity
    points: int
    low: float | None
    high: float | None
    rough: bool
    budget: int
    read: dict[tuple[str, str], tuple[Series, Series]] = field(default_factory=dict)

    def curves(self) -> list[dict[str, Any]]:
        result = []
        for i, run in enumerate(self.runs):
            for layer in self._layers(i, run):
                every, means = self._series(run, layer)
                curve: dict[str, Any] = {"run": i, "layer": layer}
                if self.panel.panel.id == "losses":
                    curve["raw"] = _listed(extremes(*every, self._max_points))
                    every = means[0], _smooth(means[1])
                result.append(curve | _listed(extremes(*every, self._max_points)))
        return result

    def maps(self) -> list[dict[str, Any]]:
        if not self.panel.panel.heatmap:
            return []
        result = []
        for i, run in enumerate(self.runs):
            layers = [layer for layer in self._layers(i, run) if layer != WHOLE]
            if layers:
                drawn = grid({layer: self._series(run, layer)[1] for layer in layers}, COLUMNS)
                z = [plain(row, 4) for row in drawn.z]
                result.append({"run": i, "layers": layers, "x": plain(drawn.steps), "z": z})
        return result

    def _layers(self, i: int, run: RunView) -> list[str]:
        available = self.names[i]
        layers = self.quantity.layers if run.first else (WHOLE,)
        return [layer for layer in layers if self.quantity.metric(layer) in available]

    @cached_property
    def _max_points(self) -> int:
        """Points of one curve."""
        count = sum(len(self._layers(i, run)) for i, run in enumerate(self.runs))
        return max(40, min(self.points, self.budget // max(count, 1)))

    def _series(self, run: RunView, layer: str) -> tuple[Series, Series]:
        """(values to draw the range of, values to average).

        They are the same, unless a long series was not read yet: of that the database returns extremes and means per bin.
        """
        key = (run.label, layer)
        if key not in self.read:
            self.read[key] = self._from(run.metrics_reader, self.quantity.metric(layer))
        return self.read[key]

    def _from(self, metrics_reader: MetricsReader, name: str) -> tuple[Series, Series]:
        if self.rough:
            result = within(
                *metrics_reader.subsample(name, max(60, min(1000, 4000 // len(self.quantity.layers)))),
                self.low,
                self.high,
            )
            return result, result
        bins = metrics_reader.binned(name, self._max_points // 2 - 1, self.low, self.high)
        if bins is None:
            result = within(*metrics_reader.series(name), self.low, self.high)
            return result, result
        first, _, _, means, _ = bins
        return between(*bins), (first, means)


def _listed(series: Series) -> dict[str, list[Any]]:
    return {"x": plain(series[0]), "y": plain(series[1])}


def _smooth(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Means over the last 2 % of steps; what is not finite is left out, and shown as such where there is nothing else."""
    fine = np.isfinite(values)
    if fine.all():
        return smooth(values)
    result = np.full(len(values), np.nan)
    result[fine] = smooth(values[fine])
    return result


def findings(runs: Sequence[RunView], limit: int | None = None) -> list[dict[str, str]]:
    """Findings about each run, in sentences, as `run_findings` orders them."""
    return [
        {
            "run": run.label, "kind": finding.kind, "text": finding.text, "action": finding.action,
            "link": anchor(finding.panel) if finding.panel else "", "docs": docs_url(finding.docs),
        }
        for run in runs
        for finding in run_findings(run, limit)
    ]  # fmt: skip


def run_findings(run: RunView, limit: int | None = None) -> list[Finding]:
    """The findings about one run. With `limit`, from at most that many of its metrics: a last sentence says so.

    Alerts come first, one line per rule and quantity. Where a finding warns of the same panel, it stands in their place. Other
    warnings follow, then what went well, then notes.
    """
    names: Collection[str] = run.metrics_reader.names()
    raised = [group.finding(run.roles) for group in grouped(names, run.metrics_reader.series)]
    count, left_out = len(names), 0
    if limit is not None and count > limit:
        names, left_out = select_names(names, limit, run.order)
    stated = history_findings(MetricHistory(sorted(names), run.metrics_reader.series, run.order, run.roles))
    if left_out:
        stated.append(
            Finding("note", f"This is from {count - left_out:,} of {count:,} metrics, a part of every quantity.")
        )
    warned = {finding.panel for finding in stated if finding.kind == "warning"}
    alerted = {finding.panel for finding in raised}
    stated.sort(key=lambda finding: not (finding.kind == "warning" and finding.panel in alerted))
    return [*(finding for finding in raised if finding.panel not in warned), *stated]


def _order(runs: Sequence[RunView]) -> tuple[str, ...]:
    return next((run.order for run in runs if run.order), ())
