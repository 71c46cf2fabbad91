"""Alerts: rules on anything that is measured, judged while training goes on.

    excite.watch(model, x, "runs/first", alerts=[Above("loss/step", 10, then="raise"), NotFinite(then=print)])

A rule is a pure function of what was measured so far. It speaks up when it begins to be true of a name, and again only
after it has been false of it in between.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any, Literal

import torch

from excite._core.checks import check_count, check_number, check_text, shown
from excite.errors import ExciteError, InputError

log = logging.getLogger("excite")
_COUNTS, _NUMBERS = ("looks", "window"), ("limit", "share", "least", "factor", "flat")  # fields of the rules below
_KEPT = 1024  # values of a name that rules can look back on


@dataclass(frozen=True)
class Alert:
    """`rule` became true of `name` at `step`, where it had this value."""

    step: int
    rule: str
    name: str
    value: float
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


class AlertRaised(ExciteError):
    """A rule with then="raise" became true; `alert` says which."""

    def __init__(self, alert: Alert):
        super().__init__(str(alert))
        self.alert = alert


Action = Literal["log", "raise"] | Callable[[Alert], object]


class Series:
    """What was measured under one name: the newest values, and the largest of all."""

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=_KEPT)
        self.values: deque[float] = deque(maxlen=_KEPT)
        self.largest = -math.inf

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        if math.isfinite(value):
            self.largest = max(self.largest, value)

    def between(self, first: int, last: int) -> list[float]:
        """Values of steps first < step ≤ last."""
        return [v for s, v in zip(self.steps, self.values) if first < s <= last]

    def newest(self, n: int) -> list[float]:
        return [self.values[-i] for i in range(min(n, len(self.values)), 0, -1)]

    def state_dict(self) -> dict[str, Any]:
        values = torch.tensor(self.values, dtype=torch.float64)
        return {"steps": torch.tensor(self.steps, dtype=torch.int64), "values": values, "largest": self.largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = deque(state["steps"].tolist(), maxlen=_KEPT)
        self.values = deque(state["values"].tolist(), maxlen=_KEPT)
        self.largest = float(state["largest"])


History = Mapping[str, Series]


@dataclass(frozen=True)
class Rule:
    """Base of all rules. `names` is a pattern such as "rank/effective/*"; `then` is "log", "raise" or a function.

    A rule of your own defines `judge`: why it is true of `name` now, or None.
    """

    names: str = "*"
    _: KW_ONLY
    then: Action = "log"

    def __post_init__(self) -> None:
        for name in ("names", "loss", *_COUNTS, *_NUMBERS) if type(self).__module__ == __name__ else ("names",):
            if hasattr(self, name):
                check = check_count if name in _COUNTS else check_number if name in _NUMBERS else check_text
                object.__setattr__(self, name, check(getattr(self, name), f"alerts: {name}"))
        if self.then not in ("log", "raise") and not callable(self.then):
            raise InputError(f"alerts: expected then='log', 'raise' or a function; got {shown(self.then)}")

    @property
    def key(self) -> str:
        """What the rule says, whatever it does then: two of the same key are true of the same."""
        said = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.name != "then"]
        return f"{type(self).__qualname__}({', '.join(said)})"

    def judge(self, history: History, name: str) -> str | None:
        raise NotImplementedError(f"{type(self).__name__} has to define judge(self, history, name)")


@dataclass(frozen=True)
class Above(Rule):
    """Above `limit` at the last `looks` measurements."""

    limit: float = 0.0
    looks: int = 1

    def judge(self, history: History, name: str) -> str | None:
        last = history[name].newest(self.looks)
        if len(last) < self.looks or not all(value > self.limit for value in last):
            return None
        return f"{name} is {last[-1]:.4g}, above {self.limit:.4g}"


@dataclass(frozen=True)
class Below(Rule):
    """Below `limit` at the last `looks` measurements."""

    limit: float = 0.0
    looks: int = 1

    def judge(self, history: History, name: str) -> str | None:
        last = history[name].newest(self.looks)
        if len(last) < self.looks or not all(value < self.limit for value in last):
            return None
        return f"{name} is {last[-1]:.4g}, below {self.limit:.4g}"


@dataclass(frozen=True)
class NotFinite(Rule):
    """NaN or infinite. Margins are left out: there infinity says that a point was not broken."""

    names: str = "loss/*"

    def judge(self, history: History, name: str) -> str | None:
        value = history[name].values[-1]
        if math.isfinite(value) or name.startswith("margin/"):
            return None
        return f"{name} is {value}: training has broken down, or is about to"


@dataclass(frozen=True)
class Fell(Rule):
    """At the last `looks` measurements below `share` of the largest value so far, if that was at least `least`.

    As it stands: the effective rank of a layer's input has collapsed.
    """

    names: str = "rank/effective/*"
    share: float = 0.25
    looks: int = 3
    least: float = 4.0

    def judge(self, history: History, name: str) -> str | None:
        series = history[name]
        last = series.newest(self.looks)
        if series.largest < self.least or len(last) < self.looks:
            return None
        if not all(value < self.share * series.largest for value in last):
            return None
        return f"{name} fell from {series.largest:.4g} to {last[-1]:.4g}"


@dataclass(frozen=True)
class SteeperWhileFlat(Rule):
    """The mean of a steepness over the last `window` steps is `factor` times that over the window before, while the loss
    did not fall by more than `flat` of itself: the function gets steeper and nothing is gained."""

    names: str = "trajectory/mean/*"
    factor: float = 2.0
    window: int = 500
    flat: float = 0.02
    loss: str = "loss/step"
    looks: int = 5  # measurements of each that a window must hold

    def judge(self, history: History, name: str) -> str | None:
        if self.loss not in history:
            return None
        now = history[name].steps[-1]
        means = []
        for one in (name, self.loss):
            for last in (now - self.window, now):
                values = history[one].between(last - self.window, last)
                if len(values) < self.looks or not all(map(math.isfinite, values)):
                    return None
                means.append(fmean(values))
        before, after, loss_before, loss_after = means
        if after < self.factor * before or before <= 0 or loss_after < loss_before - self.flat * abs(loss_before):
            return None
        return (
            f"{name} grew from {before:.4g} to {after:.4g} within {self.window} steps "
            f"while {self.loss} went from {loss_before:.4g} to {loss_after:.4g}"
        )


def default_alerts() -> list[Rule]:
    """A loss that is not finite, a layer whose rank collapsed, steepness without gain, drift that nothing explains."""
    drift = Above("conservation/rest/*", limit=0.05, looks=3)
    return [NotFinite(), Fell(), SteeperWhileFlat(), drift]


class Alerts:
    """Keeps the newest values of every name that a rule asks for, and says what becomes true."""

    def __init__(self, rules: Iterable[Rule]):
        self.rules = list(rules)
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise InputError(
                    f"alerts: expected rules such as excite.monitor.alerts.Above('loss/step', limit=10); got {rule!r}"
                )
        self._history: dict[str, Series] = {}
        self._matching: dict[str, list[int]] = {}
        self._watched: dict[str, bool] = {}
        self._true: set[tuple[int, str]] = set()

    def look(self, step: int, values: Mapping[str, float]) -> list[tuple[Rule, Alert]]:
        """Take in values measured at `step`; what begins to be true with them."""
        watched = {name: value for name, value in values.items() if self._watches(name)}
        for name, value in watched.items():
            self._history.setdefault(name, Series()).add(step, value)
        return [begun for name, value in watched.items() for begun in self._judge(step, name, value)]

    def state_dict(self) -> dict[str, Any]:
        """What rules have seen, and of what they are true: a resumed training is judged as if it had not stopped."""
        true = [[self.rules[number].key, name] for number, name in sorted(self._true)]
        return {"history": {name: series.state_dict() for name, series in self._history.items()}, "true": true}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rules may have changed: a new one begins with what was kept for the others."""
        self._history = {name: Series() for name in state["history"] if self._watches(name)}
        for name, series in self._history.items():
            series.load_state_dict(state["history"][name])
        true = {(key, name) for key, name in state["true"]}
        self._true = {(i, name) for i, rule in enumerate(self.rules) for key, name in true if key == rule.key}

    def _judge(self, step: int, name: str, value: float) -> Iterator[tuple[Rule, Alert]]:
        for number in self._rules_for(name):
            rule = self.rules[number]
            why = rule.judge(self._history, name)
            if why is None:
                self._true.discard((number, name))
            elif (number, name) not in self._true:
                self._true.add((number, name))
                yield rule, Alert(step, type(rule).__name__, name, value, why)

    def _rules_for(self, name: str) -> list[int]:
        if name not in self._matching:
            self._matching[name] = [i for i, rule in enumerate(self.rules) if fnmatchcase(name, rule.names)]
        return self._matching[name]

    def _watches(self, name: str) -> bool:
        """Whether a rule asks for it, for itself or beside another."""
        if name not in self._watched:
            asked = any(getattr(rule, "loss", None) == name for rule in self.rules)
            self._watched[name] = asked or bool(self._rules_for(name))
        return self._watched[name]


def act(begun: Sequence[tuple[Rule, Alert]], *, speak: bool = True) -> None:
    """Log lines and calls, where `speak` (with several processes: the first one); then the first that is to be raised."""
    raised = None
    for rule, alert in begun:
        if speak:
            log.warning("%s", alert)
            if callable(rule.then):
                rule.then(alert)
        if rule.then == "raise":
            raised = raised or AlertRaised(alert)
    if raised is not None:
        raise raised
