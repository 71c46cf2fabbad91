"""The rules: what is true of a metric, given what was measured so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from statistics import fmean
from typing import ClassVar, Literal

from excite._core.checks import check_count, check_number, check_text, shown
from excite._core.compatibility import renamed_fields
from excite.errors import InputError
from excite.monitor.alerts.alert import Alert
from excite.monitor.alerts.series import History
from excite.probes.findings import ANSWERS, needed_rank

# Fields of the rules below.
_COUNTS = ("measurements", "window")
_NUMBERS = ("limit", "fraction", "min_peak", "factor", "flat")
_RECENT = 5  # losses that are averaged
_RISING = 1.05  # a rank that is larger by so much than a moment ago recovers


Action = Literal["log", "raise"] | Callable[[Alert], object]


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
        >>> from excite.monitor.alerts import Alerts
        >>> alerts = Alerts([Doubled("loss/step")])
        >>> alerts.update(1, {"loss/step": 1.0}), len(alerts.update(2, {"loss/step": 3.0}))
        ([], 1)
    """

    beside: ClassVar[tuple[str, ...]] = ()  # further metrics that `judge` reads

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
        settings = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.name != "then"]
        return f"{type(self).__qualname__}({', '.join(settings)})"

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

    By default about the effective rank of the inputs of layers. For a transformer with one answer for each sequence, ranks that fall towards the
    number of its classes while the loss falls are no collapse: m classes need m − 1 directions.

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

    beside: ClassVar[tuple[str, ...]] = ("loss/step", ANSWERS)

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
        if name.startswith("rank/") and _answers(history, last):
            return None
        return f"{name} fell from {series.largest:.4g} to {last[-1]:.4g}"


def _answers(history: History, ranks: list[float]) -> bool:
    """Whether these ranks are those of a model that has learned to answer, and no lower, or rising towards them.

    Answers are learned one direction after the other: on the way to m classes the rank may fall to 1 for a few steps.
    """
    if not all(name in history and history[name].values for name in Fell.beside):
        return False
    loss, answers = (history[name] for name in Fell.beside)
    needed = needed_rank(answers.values[-1], loss.first, fmean(loss.newest(_RECENT)))
    return needed is not None and (ranks[-1] >= needed or ranks[-1] > _RISING * min(ranks))


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
        current = history[name].steps[-1]
        means = []
        for metric in (name, self.loss):
            for last in (current - self.window, current):
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
