"""Applies rules to new measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from excite.errors import InputError
from excite.monitor.alerts.alert import Alert
from excite.monitor.alerts.rules import Rule
from excite.monitor.alerts.series import Series


class Alerts:
    """Applies rules to new measurements and remembers of which metrics they are true.

    Args:
        rules: The rules.

    Raises:
        InputError: If one of them is not a rule.

    Example:
        >>> from excite.monitor.alerts import Below
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
        """Whether a rule needs it, by itself or with another metric."""
        if name not in self._watched:
            requested = any(getattr(rule, "loss", None) == name or name in rule.beside for rule in self.rules)
            self._watched[name] = requested or bool(self._rules_for(name))
        return self._watched[name]
