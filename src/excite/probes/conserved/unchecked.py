"""Which steps a law was checked in, and why not in others.

A step is evidence for a law only if the change of the law was predicted: from the gradient, the optimizer's formula and, in
front of a normalization, its eps. Where the update is taken as it comes, whatever it does to the law is explained by
definition, so that nothing was checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# By key, for the page: metrics are numbers, and `conservation/label/KEY` says which of these applies.
REASONS = {
    "closure": "optimizer.step(closure) makes the gradients inside the step, where they cannot be read",
    "optimizer": "Excite has no formula that predicts this optimizer's update from the gradient",
    "scaler": "a fused optimizer unscales its gradients inside the step (GradScaler)",
    "normalization": "the inputs of a normalization were not available, and with them the effect of its eps",
}


@dataclass(frozen=True)
class Reason:
    """Why a step does not check a law; `key` is one of REASONS."""

    key: str
    what: str


class UncheckedSteps:
    """By law: in how many steps it was not checked, and the first reason."""

    def __init__(self) -> None:
        self._missing: dict[str, tuple[int, Reason]] = {}

    def add(self, law: str, reason: Reason) -> None:
        """Counts a step whose law was not checked."""
        count, first = self._missing.get(law, (0, reason))
        self._missing[law] = count + 1, first

    def __contains__(self, law: str) -> bool:
        return law in self._missing

    @property
    def keys(self) -> list[str]:
        """Of the reasons, each once."""
        return list(dict.fromkeys(reason.key for _, reason in self._missing.values()))

    def fraction(self, law: str, steps: int) -> float:
        """Of `steps` steps, those in which a law was not checked."""
        return min(1.0, self._missing[law][0] / max(1, steps)) if law in self._missing else 0.0

    def why(self, law: str, steps: int) -> str | None:
        """Why a law is not checked; None if it was checked in all of `steps` steps."""
        if law not in self._missing:
            return None
        count, reason = self._missing[law]
        return reason.what if count >= steps else f"{reason.what} (in {count} of {steps} steps)"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {law: (count, reason.key, reason.what) for law, (count, reason) in self._missing.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._missing = {law: (int(count), Reason(key, what)) for law, (count, key, what) in state.items()}
