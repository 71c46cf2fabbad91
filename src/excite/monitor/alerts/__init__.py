"""Alerts: rules about metrics, evaluated while training runs.

    excite.watch(model, x, "runs/first", alerts=[Above("loss/step", 10, then="raise"), NotFinite(then=print)])

A rule is a pure function of what was measured so far. An alert is issued when it becomes true of a metric, and again only
after it has been false of it in between.
"""

from excite.monitor.alerts.alert import Alert
from excite.monitor.alerts.evaluation import Alerts
from excite.monitor.alerts.messages import AlertRaised, act, advice, lines
from excite.monitor.alerts.rules import (
    Above,
    Below,
    Fell,
    NotFinite,
    Rule,
    SteeperWhileFlat,
    default_alerts,
)
from excite.monitor.alerts.series import Series

__all__ = [
    "Above",
    "Alert",
    "AlertRaised",
    "Alerts",
    "Below",
    "Fell",
    "NotFinite",
    "Rule",
    "Series",
    "SteeperWhileFlat",
    "act",
    "advice",
    "default_alerts",
    "lines",
]
