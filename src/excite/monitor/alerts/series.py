"""The measurements of a metric that rules judge."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

_MAX_VALUES = 1024  # values of a metric that rules can refer to


class Series:
    """The measurements of one metric: the newest values, and the largest of all.

    Attributes:
        steps: Steps of the newest values.
        values: The newest values.
        largest: Largest finite value so far.
        first: First finite value; NaN before there is one.

    Example:
        >>> series = Series()
        >>> series.add(1, 0.5), series.add(2, 0.25)
        (None, None)
        >>> series.newest(2), series.largest
        ([0.5, 0.25], 0.5)
    """

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=_MAX_VALUES)
        self.values: deque[float] = deque(maxlen=_MAX_VALUES)
        self.largest = -math.inf
        self.first = math.nan

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
            self.first = value if math.isnan(self.first) else self.first

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
        steps = torch.tensor(self.steps, dtype=torch.int64)
        return {"steps": steps, "values": values, "largest": self.largest, "first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the values."""
        self.steps = deque(state["steps"].tolist(), maxlen=_MAX_VALUES)
        self.values = deque(state["values"].tolist(), maxlen=_MAX_VALUES)
        self.largest = float(state["largest"])
        self.first = float(state.get("first", math.nan))


History = Mapping[str, Series]
