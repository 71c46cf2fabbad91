"""Alerts: rules about metrics, evaluated while training runs.

    excite.watch(model, x, "runs/first", alerts=[Above("loss/step", 10, then="raise"), NotFinite(then=print)])

A rule is a pure function of what was measured so far. An alert is issued when it becomes true of a metric, and again only
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
from excite._core.compatibility import renamed_fields
from excite.errors import ExciteError, InputError

log = logging.getLogger("excite")
_COUNTS, _NUMBERS = (
    ("measurements", "window"),
    ("limit", "fraction", "min_peak", "factor", "flat"),
)  # fields of the rules below
_NAMED = 3  # metrics named in one line
_KEPT = 1024  # values of a metric that rules can refer to


@dataclass(frozen=True)
class Alert:
    """A rule that became true.

    Attributes:
        step: The step at which it did.
        rule: Name of the rule's class.
        name: The metric it is about.
        value: Value of the metric at that step.
        message: The reason, as a sentence.

    Example:
        >>> [(_, alert)] = Alerts([NotFinite()]).update(3, {"loss/step": float("nan")})
        >>> alert.step, alert.name
        (3, 'loss/step')
    """

    step: int
    rule: str
    name: str
    value: float
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


class AlertRaised(ExciteError):
    """Raised by `watch.step` if a rule with ``then="raise"`` became true.

    Attributes:
        alert: The alert.
    """

    def __init__(self, alert: Alert):
        super().__init__(str(alert))
        self.alert = alert


Action = Literal["log", "raise"] | Callable[[Alert], object]


class Series:
    """The measurements of one metric: the newest values, and the largest of all.

    Attributes:
        steps: Steps of the newest values.
        values: The newest values.
        largest: Largest finite value so far.

    Example:
        >>> series = Series()
        >>> series.add(1, 0.5), series.add(2, 0.25)
        (None, None)
        >>> series.newest(2), series.largest
        ([0.5, 0.25], 0.5)
    """

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=_KEPT)
        self.values: deque[float] = deque(maxlen=_KEPT)
        self.largest = -math.inf

    def add(self, step: int, value: float) -> None:
        """Appends a value.

        Args:
            step: Step of the training at which it was measured.
            value: The value; infinite values and NaN do not count for `largest`.
        """
        self.steps.append(step)
        self.values.append(value)
        if math.isfinite(value):
            self.largest = max(self.largest, value)

    def between(self, first: int, last: int) -> list[float]:
        """Values of steps first < step ≤ last.

        Args:
            first: Step before the first.
            last: The last step.

        Returns:
            The values in the order of steps.
        """
        return [v for s, v in zip(self.steps, self.values) if first < s <= last]

    def newest(self, n: int) -> list[float]:
        """Returns the last `n` values, or all if there are fewer."""
        return [self.values[-i] for i in range(min(n, len(self.values)), 0, -1)]

    def state_dict(self) -> dict[str, Any]:
        """Returns the values, for a checkpoint."""
        values = torch.tensor(self.values, dtype=torch.float64)
        return {"steps": torch.tensor(self.steps, dtype=torch.int64), "values": values, "largest": self.largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the values."""
        self.steps = deque(state["steps"].tolist(), maxlen=_KEPT)
        self.values = deque(state["values"].tolist(), maxlen=_KEPT)
        self.largest = float(state["largest"])


History = Mapping[str, Series]


@dataclass(frozen=True)
class Rule:
    """Base class of all rules. A rule is true or false of each metric it is about, given what was measured so far.

    A subclass defines `judge`, which returns the reason why the rule is true of a metric now, or None.

    Args:
        names: Pattern of metric names, such as "rank/effective/*".
        then: "log" to log a warning, "raise" to end the training with `AlertRaised`, or a function that is called with the `Alert`.

    Raises:
        InputError: If an argument is not what is expected.

    Example:
        >>> class Doubled(Rule):
        ...     def judge(self, history, name):
        ...         last = history[name].newest(2)
        ...         return f"{name} doubled" if len(last) == 2 and last[1] > 2 * last[0] else None
        >>> alerts = Alerts([Doubled("loss/step")])
        >>> alerts.update(1, {"loss/step": 1.0}), len(alerts.update(2, {"loss/step": 3.0}))
        ([], 1)
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
        """The rule without its action: two rules with the same key are true of the same metrics."""
        said = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.name != "then"]
        return f"{type(self).__qualname__}({', '.join(said)})"

    def judge(self, history: History, name: str) -> str | None:
        """Judges one metric.

        Args:
            history: All measurements so far by metric name.
            name: The metric, which has a new value.

        Returns:
            Why the rule is true of it, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define judge(self, history, name)")


@renamed_fields(looks="measurements")
@dataclass(frozen=True)
class Above(Rule):
    """True while the last measurements of a metric are above a limit.

    Args:
        names: Pattern of metric names.
        limit: The limit.
        measurements: Number of measurements in a row that have to be above it.
        then: See `Rule`.

    Example:
        >>> from excite.monitor.alerts import Above
        >>> rule = Above("loss/step", limit=10, then="raise")
    """

    limit: float = 0.0
    measurements: int = 1

    def judge(self, history: History, name: str) -> str | None:
        """Returns the message if the last values are all above the limit, else None."""
        last = history[name].newest(self.measurements)
        if len(last) < self.measurements or not all(value > self.limit for value in last):
            return None
        return f"{name} is {last[-1]:.4g}, above {self.limit:.4g}"


@renamed_fields(looks="measurements")
@dataclass(frozen=True)
class Below(Rule):
    """True while the last measurements of a metric are below a limit.

    Args:
        names: Pattern of metric names.
        limit: The limit.
        measurements: Number of measurements in a row that have to be below it.
        then: See `Rule`.

    Example:
        >>> from excite.monitor.alerts import Below
        >>> rule = Below("rank/effective/*", limit=2)
    """

    limit: float = 0.0
    measurements: int = 1

    def judge(self, history: History, name: str) -> str | None:
        """Returns the message if the last values are all below the limit, else None."""
        last = history[name].newest(self.measurements)
        if len(last) < self.measurements or not all(value < self.limit for value in last):
            return None
        return f"{name} is {last[-1]:.4g}, below {self.limit:.4g}"


@dataclass(frozen=True)
class NotFinite(Rule):
    """True while a metric is NaN or infinite. Margins are left out: an infinite margin means that no adversarial example was found.

    Args:
        names: Pattern of metric names.
        then: See `Rule`.

    Example:
        >>> from excite.monitor.alerts import NotFinite
        >>> rule = NotFinite("loss/*", then="raise")
    """

    names: str = "loss/*"

    def judge(self, history: History, name: str) -> str | None:
        """Returns the message if the last value is infinite or not a number, else None."""
        value = history[name].values[-1]
        if math.isfinite(value) or name.startswith("margin/"):
            return None
        return f"{name} is {value}: training has broken down, or is about to"


@renamed_fields(looks="measurements", share="fraction", least="min_peak")
@dataclass(frozen=True)
class Fell(Rule):
    """True while a metric has collapsed: its last measurements are below a fraction of its largest value.

    By default about the effective rank of the inputs of layers.

    Args:
        names: Pattern of metric names.
        fraction: The fraction.
        measurements: Number of measurements in a row that have to be below it.
        min_peak: The largest value has to have been at least this.
        then: See `Rule`.

    Example:
        >>> from excite.monitor.alerts import Fell
        >>> rule = Fell("rank/effective/*", then="raise")
    """

    names: str = "rank/effective/*"
    fraction: float = 0.25
    measurements: int = 3
    min_peak: float = 4.0

    def judge(self, history: History, name: str) -> str | None:
        """Returns the message if the last values are all below a fraction of the largest so far, else None."""
        series = history[name]
        last = series.newest(self.measurements)
        if series.largest < self.min_peak or len(last) < self.measurements:
            return None
        if not all(value < self.fraction * series.largest for value in last):
            return None
        return f"{name} fell from {series.largest:.4g} to {last[-1]:.4g}"


@renamed_fields(looks="measurements")
@dataclass(frozen=True)
class SteeperWhileFlat(Rule):
    """True while the function gets steeper without the loss falling.

    The mean of the metric over the last `window` steps is at least `factor` times that over the window before, while the mean of
    the loss fell by no more than the fraction `flat`.

    Args:
        names: Pattern of metric names.
        factor: Growth of the metric from window to window.
        window: Number of steps.
        flat: Relative decrease of the loss that counts as none.
        loss: Name of the loss metric.
        measurements: Measurements of each that a window has to hold.
        then: See `Rule`.

    Example:
        >>> from excite.monitor.alerts import SteeperWhileFlat
        >>> rule = SteeperWhileFlat(factor=3, window=1000)
    """

    names: str = "trajectory/mean/*"
    factor: float = 2.0
    window: int = 500
    flat: float = 0.02
    loss: str = "loss/step"
    measurements: int = 5  # measurements of each that a window must hold

    def judge(self, history: History, name: str) -> str | None:
        """Returns the message if the metric grew while the loss did not fall, else None."""
        if self.loss not in history:
            return None
        now = history[name].steps[-1]
        means = []
        for metric in (name, self.loss):
            for last in (now - self.window, now):
                values = history[metric].between(last - self.window, last)
                if len(values) < self.measurements or not all(map(math.isfinite, values)):
                    return None
                means.append(fmean(values))
        before, after, loss_before, loss_after = means
        if after < self.factor * before or before <= 0 or loss_after < loss_before - self.flat * abs(loss_before):
            return None
        return (
            f"{name} grew from {before:.4g} to {after:.4g} within {self.window} steps "
            f"while {self.loss} went from {loss_before:.4g} to {loss_after:.4g}"
        )


_ADVICE = {  # what to do: by rule, or by rule and quantity
    "NotFinite": "Lower the learning rate or the radius, or clip gradients; continue from a checkpoint before.",
    "Fell rank/effective": "Lower the learning rate or the weight decay, or excite these layers: their weights along the lost "
    "directions are no longer trained.",
    "SteeperWhileFlat": "Stop here or regularize: the network fits details, which costs margin.",
    "Above conservation/rest": "Find what else changes these weights: clipping, weight averaging, or an optimizer that is not "
    "accounted for.",
}


def advice(rule: str, name: str) -> str:
    """Advice on an alert.

    Args:
        rule: Name of the rule's class.
        name: The metric, or its quantity such as "rank/effective".

    Returns:
        A sentence; for a rule of your own, which chart to look at.

    Example:
        >>> advice("NotFinite", "loss/step")
        '...'
    """
    quantity = "/".join(name.split("/")[:2])
    text = _ADVICE.get(f"{rule} {quantity}") or _ADVICE.get(rule)
    return text or f"See the chart of {quantity} for when it began."


def default_alerts() -> list[Rule]:
    """The rules that `excite.watch` applies by default.

    Returns:
        Rules for a loss that is not finite, an effective rank that collapsed, a function that gets steeper while the loss stands
        still, and drift of a conserved quantity that nothing explains.

    Example:
        >>> watch = excite.watch(model, example=x, alerts=[*default_alerts(), Above("loss/step", limit=10)])
    """
    drift = Above("conservation/rest/*", limit=0.05, measurements=3)
    return [NotFinite(), Fell(), SteeperWhileFlat(), drift]


class Alerts:
    """Applies rules to new measurements and remembers of which metrics they are true.

    Args:
        rules: The rules.

    Raises:
        InputError: If one of them is not a rule.

    Example:
        >>> alerts = Alerts([Below("rank/effective/*", limit=2)])
        >>> [alert.message for _, alert in alerts.update(100, {"rank/effective/fc": 1.5})]
        ['rank/effective/fc is 1.5, below 2']
        >>> alerts.update(200, {"rank/effective/fc": 1.4})  # still true: reported once
        []
    """

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

    def update(self, step: int, values: Mapping[str, float]) -> list[tuple[Rule, Alert]]:
        """Adds the values measured at a step.

        Args:
            step: Step of the training.
            values: Values by metric name.

        Returns:
            The rules that become true with them, each with its alert.
        """
        watched = {name: value for name, value in values.items() if self._watches(name)}
        for name, value in watched.items():
            self._history.setdefault(name, Series()).add(step, value)
        return [begun for name, value in watched.items() for begun in self._judge(step, name, value)]

    def state_dict(self) -> dict[str, Any]:
        """State of the rules for a checkpoint: a resumed training is judged as if it had not stopped."""
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
            requested = any(getattr(rule, "loss", None) == name for rule in self.rules)
            self._watched[name] = requested or bool(self._rules_for(name))
        return self._watched[name]


def act(begun: Sequence[tuple[Rule, Alert]], *, speak: bool = True) -> None:
    """Logs alerts, calls the functions of their rules, and raises the first with ``then="raise"``.

    Alerts of one rule about one quantity, such as the rank of twelve layers, are logged as one line.

    Args:
        begun: Rules that became true, with their alerts.
        speak: Whether to log and call; with several processes only the first one does.

    Raises:
        AlertRaised: If a rule has ``then="raise"``.

    Example:
        >>> told = []
        >>> alerts = Alerts([Above("loss/step", limit=10, then=told.append)])
        >>> act(alerts.update(1, {"loss/step": 12.0}))
        >>> told[0].message
        'loss/step is 12, above 10'
    """
    if speak:
        for line in lines([alert for _, alert in begun]):
            log.warning("%s", line)
        for rule, alert in begun:
            if callable(rule.then):
                rule.then(alert)
    raised = next((alert for rule, alert in begun if rule.then == "raise"), None)
    if raised is not None:
        raise AlertRaised(raised)


def lines(alerts: Iterable[Alert]) -> list[str]:
    """One line per rule and quantity, with what to do.

    Args:
        alerts: Alerts, in the order in which they began.

    Returns:
        The message of the first alert of each group, the other metrics by name, and the advice.

    Example:
        >>> lines([alert for _, alert in Alerts([NotFinite()]).update(3, {"loss/step": float("nan")})])
    """
    groups: dict[tuple[str, str], list[Alert]] = {}
    for alert in alerts:
        groups.setdefault((alert.rule, "/".join(alert.name.split("/")[:2])), []).append(alert)
    sentences = []
    for (rule, quantity), members in groups.items():
        names = list(dict.fromkeys(alert.name for alert in members))[1:]
        others = ""
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            layers = ", ".join(name.removeprefix(f"{quantity}/") for name in names[:_NAMED])
            others = f"; likewise {len(names)} other{'s' if len(names) > 1 else ''}: {layers}{more}"
        sentences.append(f"{members[0]}{others}. {advice(rule, quantity)}")
    return sentences
