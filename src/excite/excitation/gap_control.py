"""A controller of the hidden radius that holds robust overfitting at a target.

Robust overfitting is the gap between the robust accuracy on training data and that on held-out data. Every few steps both
are measured, on the batch at hand and on as many held-out points, by the attack of the training on the input alone, with
the model in evaluation mode. Both are smoothed; then the hidden radius ρ moves:

    gap = train − held,   ρ ← ρ·exp(GAIN · clamp((gap − target)/target, −1, 1)),   between START and HIGHEST

With few data the target may be out of reach: ρ also falls (a full step down) while the robust accuracy on held-out data is
below KEEP times the best it has been. A collapsed network has no gap, so that ρ falls as well. Everything is computed with tensors where the model is: nothing waits for
a GPU, and a captured step reads the current ρ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from excite._core.calls import check_finite
from excite._core.checks import check_count, check_dense, check_number
from excite.errors import InputError

START, HIGHEST = 1e-3, 0.05
GAIN = 0.15
MEMORY = 0.8
KEEP = 0.9
_NUMBERS = ("factor", "train", "held", "best")


class GapController:
    """Hidden radius and smoothed robust accuracies, each a tensor of one number in float32.

    Args:
        held_out: Points and labels (x, y) that are not trained on.
        target: Gap to hold, as a difference of fractions.
        every: Steps between two measurements.

    Raises:
        InputError: If there are no held-out points, or not one label for each.
    """

    def __init__(self, held_out: object, target: float, every: int):
        if held_out is None:
            raise InputError(
                "hidden_radius='auto' holds the gap between training and held-out data: give held_out=(x, y), "
                "points that are not trained on"
            )
        if not isinstance(held_out, tuple | list) or len(held_out) != 2:
            raise InputError(f"held_out: expected points and labels (x, y); got {type(held_out).__name__}")
        x, y = held_out
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() and len(x) == y.numel() > 0):
            raise InputError("held_out: expected points (N, ...) and one label each, N at least 1")
        check_dense(x, "held_out")
        check_finite(x, "held_out")
        self.x, self.y = x.detach(), y.detach()
        self.target = check_number(target, "gap_target", 0, 1, above=True)
        self.every = check_count(every, "gap_every")
        self.factor = torch.tensor(START)
        self.train, self.held, self.best = (torch.tensor(float("nan")) for _ in range(3))
        self.steps = 0
        self._next = 0  # the first held-out point of the next measurement

    def to(self, device: torch.device) -> None:
        """Moves the state, and the held-out points, to a device."""
        if self.factor.device != device:
            for name in ("factor", "train", "held", "best", "x", "y"):
                setattr(self, name, getattr(self, name).to(device))

    def due(self) -> bool:
        """Counts a step; whether to measure at it."""
        self.steps += 1
        return (self.steps - 1) % self.every == 0

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """The next held-out points, at most `size`, beginning again at the end."""
        indices = torch.arange(self._next, self._next + min(size, len(self.x)), device=self.x.device) % len(self.x)
        self._next = int((self._next + len(indices)) % len(self.x))
        return self.x[indices], self.y[indices]

    @torch.no_grad()
    def observe(self, train: Tensor, held: Tensor) -> None:
        """Takes one measurement of both robust accuracies and moves the radius."""
        for smoothed, now in ((self.train, train), (self.held, held)):
            now = now.to(smoothed.dtype)
            smoothed.copy_(torch.where(smoothed.isnan(), now, MEMORY * smoothed + (1 - MEMORY) * now))
        self.best.copy_(torch.fmax(self.best, self.held))
        excess = ((self.train - self.held - self.target) / self.target).clamp(-1, 1)
        excess = torch.where(self.held < KEEP * self.best, -1.0, excess)
        self.factor.copy_((self.factor * torch.exp(GAIN * excess)).clamp(START, HIGHEST))

    def measured(self) -> dict[str, float]:
        """Metrics for a run."""
        train, held = float(self.train), float(self.held)
        return {
            "hidden_radius": float(self.factor),
            "robust_train": train,
            "robust_held_out": held,
            "gap": train - held,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        numbers = {name: float(getattr(self, name)) for name in _NUMBERS}
        return {**numbers, "steps": self.steps, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        for name in _NUMBERS:
            getattr(self, name).fill_(state[name])
        self.steps, self._next = int(state["steps"]), int(state["next"])

    def __repr__(self) -> str:
        return f"'auto' ({float(self.factor):.3g}, gap target {self.target:g})"
