"""An alert: a rule that became true of a metric."""

from __future__ import annotations

from dataclasses import dataclass


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
        >>> from excite.monitor.alerts import Alerts, NotFinite
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
