"""What happens with alerts: a line in the log with advice, a call, an exception."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from excite.errors import ExciteError
from excite.monitor.alerts.alert import Alert
from excite.monitor.alerts.rules import Rule
from excite.probes.findings import with_role

log = logging.getLogger("excite")
_NAMED = 3  # metrics named in one line


class AlertRaised(ExciteError):
    """Raised by `watch.step` if a rule with ``then="raise"`` became true.

    Attributes:
        alert: The alert.
    """

    def __init__(self, alert: Alert):
        super().__init__(str(alert))
        self.alert = alert


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


def act(begun: Sequence[tuple[Rule, Alert]], *, speak: bool = True, roles: Mapping[str, str] | None = None) -> None:
    """Logs alerts, calls the functions of their rules, and raises the first with ``then="raise"``.

    Alerts of one rule about one quantity, such as the rank of twelve layers, are logged as one line.

    Args:
        begun: Rules that became true, with their alerts.
        speak: Whether to log and call; with several processes only the first one does.
        roles: What layers and heads do, by name (`Wiring.roles`): logged behind their names.

    Raises:
        AlertRaised: If a rule has ``then="raise"``.

    Example:
        >>> from excite.monitor.alerts import Above, Alerts
        >>> received = []
        >>> alerts = Alerts([Above("loss/step", limit=10, then=received.append)])
        >>> act(alerts.update(1, {"loss/step": 12.0}))
        >>> received[0].message
        'loss/step is 12, above 10'
    """
    if speak:
        for line in lines([alert for _, alert in begun], roles or {}):
            log.warning("%s", line)
        for rule, alert in begun:
            if callable(rule.then):
                rule.then(alert)
    raised = next((alert for rule, alert in begun if rule.then == "raise"), None)
    if raised is not None:
        raise AlertRaised(raised)


def lines(alerts: Iterable[Alert], roles: Mapping[str, str] | None = None) -> list[str]:
    """One line per rule and quantity, with what to do.

    Args:
        alerts: Alerts, in the order in which they began.
        roles: What layers and heads do, by name (`Wiring.roles`): written behind their names.

    Returns:
        The message of the first alert of each group, the other metrics by name, and the advice.

    Example:
        >>> from excite.monitor.alerts import Alerts, NotFinite
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
            layers = ", ".join(with_role(name.removeprefix(f"{quantity}/"), roles or {}) for name in names[:_NAMED])
            others = f"; likewise {len(names)} other{'s' if len(names) > 1 else ''}: {layers}{more}"
        first = members[0]
        role = (roles or {}).get(first.name.removeprefix(f"{quantity}/"))
        text = str(first).replace(first.name, f"{first.name} ({role})", 1) if role else str(first)
        sentences.append(f"{text}{others}. {advice(rule, quantity)}")
    return sentences
