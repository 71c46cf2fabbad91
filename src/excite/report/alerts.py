"""Alerts of a run, grouped: one line for all layers with the same finding, with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from excite.monitor.alerts import advice
from excite.probes.findings import MAX_NAMED, Finding, with_role
from excite.report.panels import ALERT, panel_of, split
from excite.report.subsample import Series

_TEXTS = {
    "NotFinite": "{what} was not finite",
    "Fell": "{what} collapsed",
    "SteeperWhileFlat": "{what} grew while the loss stood still",
    "Above": "{what} was above its limit",
    "Below": "{what} was below its limit",
}
PREFIX = f"{ALERT}/"


@dataclass(frozen=True)
class AlertGroup:
    """Alerts of one rule about one quantity.

    Attributes:
        rule: Name of the rule's class.
        key: The quantity, such as "rank/effective".
        names: The metrics it became true of, by the step at which it did.
        steps: The first of these steps for each.
    """

    rule: str
    key: str
    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def text(self) -> str:
        """One line."""
        return self.line({})

    def line(self, roles: Mapping[str, str]) -> str:
        """One line, with what layers do where `roles` says so."""
        label = panel_of(self.key)[1]
        layers = [with_role(name.removeprefix(f"{self.key}/"), roles) for name in self.names if name != self.key]
        subject = label[0].upper() + label[1:]
        sentence = _TEXTS.get(self.rule, f"{self.rule}: {{what}}").format(what=subject)
        if layers:
            more = f" and {len(layers) - MAX_NAMED} more" if len(layers) > MAX_NAMED else ""
            count = f" in {len(layers)} layers" if len(layers) > 1 else " in layer"
            sentence += f"{count}{':' if len(layers) > 1 else ''} {', '.join(layers[:MAX_NAMED])}{more}"
        first, last = min(self.steps), max(self.steps)
        return f"{sentence} ({f'steps {first:,} to {last:,}' if last > first else f'step {first:,}'})."

    def finding(self, roles: Mapping[str, str] | None = None) -> Finding:
        """The line as a finding, with what to do; `roles` says what layers do, by name."""
        advised = advice(self.rule, self.key)
        return Finding("warning", self.line(roles or {}), advised, panel_of(self.key)[0], "alerts.md#what-to-do")


def group_keys(names: Iterable[str]) -> list[tuple[str, str]]:
    """(rule, quantity) of each group, from the names of the metrics `alert/RULE/METRIC`."""
    keys = dict.fromkeys(_parts(name)[:2] for name in names if name.startswith(PREFIX))
    return [key for key in keys if key[1]]


def grouped(names: Iterable[str], series: Callable[[str], Series]) -> list[AlertGroup]:
    """Alerts of a run in the order of their first step.

    Args:
        names: Names of all metrics of the run.
        series: Steps and values of a metric.

    Returns:
        One entry per rule and quantity.
    """
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in names:
        if not name.startswith(PREFIX):
            continue
        rule, key, metric = _parts(name)
        steps = series(name)[0]
        if key and len(steps):
            groups.setdefault((rule, key), []).append((int(steps[0]), metric))
    result = []
    for (rule, key), members in groups.items():
        members.sort()
        result.append(AlertGroup(rule, key, tuple(name for _, name in members), tuple(step for step, _ in members)))
    return sorted(result, key=lambda group: min(group.steps))


def _parts(name: str) -> tuple[str, str, str]:
    """(rule, quantity, metric) of an alert's name."""
    rule, _, metric = name.removeprefix(PREFIX).partition("/")
    probe, quantity, _ = split(metric)
    return rule, f"{probe}/{quantity}" if quantity else probe, metric
