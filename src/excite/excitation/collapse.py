"""Tells a training that has collapsed: the network has become constant, and its loss is that of the best constant output.

A radius that is too large leaves nothing but a constant to learn. The loss of a constant network on a batch is at least the
loss of the best constant for the labels of that batch, `Target.trivial`: log(classes) for the cross-entropy of balanced
classes. A network that has learned anything is below on some batch. `WINDOW` steps in a row without one are a collapse.
The count is a tensor where the model is: no step waits for a GPU, and it is read every `WINDOW` steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.checks import check_choice
from excite._core.preserve import capturing
from excite.errors import ModelError

WINDOW = 200
MOVES = 2  # how often a radius that holds may move outputs, at the first step, as far as they differ between samples
TRIVIAL = 0.98


def holding_fraction(ratio: float) -> float:
    """The fraction of a radius that may hold.

    Args:
        ratio: How far perturbations of this radius moved the outputs at the first step, over how far samples differ.
    """
    return min(0.25, MOVES / ratio) if 0 < ratio < math.inf else 0.25


def move_ratio(output: Tensor, move: Tensor) -> Tensor:
    """Mean length of a move of the outputs over the mean distance of the outputs of the samples from their mean.

    Args:
        output: Outputs (B, ...).
        move: How far perturbations move them, of the same shape.
    """
    output, move = output.reshape(len(output), -1), move.reshape(len(move), -1)
    ratio: Tensor = move.norm(dim=1).mean() / (output - output.mean(0)).norm(dim=1).mean()
    return ratio


class CollapseCheck:
    """Counts training steps in a row whose loss is no better than that of a constant.

    Args:
        action: "warn" once for each collapse, "stop" with a ModelError, or "ignore".
        checks: Reads numbers of a device without waiting for it.
    """

    def __init__(self, action: object, checks: DeferredChecks):
        self.action = check_choice(action, "on_collapse", ("warn", "stop", "ignore"))
        self._checks = checks
        self._calls = 0
        self.steps = torch.tensor(0.0)
        self.ratio = torch.tensor(
            math.nan
        )  # of the first step: how far perturbations move outputs over how they differ
        self._warned = False

    def first(self) -> bool:
        """Whether the next step is the first, of which `ratio` is kept."""
        return self._calls == 0 and self.action != "ignore" and not capturing()

    @torch.no_grad()
    def observe(self, loss: Tensor, trivial: Tensor, advice: Callable[[float], str]) -> None:
        """Takes the mean loss of one training step.

        Args:
            loss: The loss, a scalar.
            trivial: The loss of the best constant output; 0 where labels are all equal, which tells nothing.
            advice: From `ratio` to what to do.
        """
        if self.action == "ignore":
            return
        if self.steps.device != loss.device:
            self.steps, self.ratio = self.steps.to(loss.device), self.ratio.to(loss.device)
        above = self.steps + (trivial > 0)
        self.steps.copy_(torch.where((loss < TRIVIAL * trivial) & (trivial > 0), 0.0, above))  # NaN is not below
        self._calls += 1
        if self._calls % WINDOW == 0 and not capturing():
            self.read(advice)

    def read(self, advice: Callable[[float], str]) -> None:
        """Warns, or stops, if the training has collapsed: now on the CPU, on a GPU when the count has arrived."""

        def judge(numbers: Sequence[float]) -> None:
            steps, ratio = numbers
            if steps < WINDOW:
                self._warned = self._warned and steps > 0
                return
            message = (
                f"the network is constant: for {int(steps)} steps its loss was that of the best constant output, or not finite; "
                f"{advice(ratio)}"
            )
            if self.action == "stop":
                raise ModelError(message)
            if not self._warned:
                self._warned = True
                warnings.warn(message, stacklevel=6)

        if self.action != "ignore":
            self._checks.add(torch.stack([self.steps, self.ratio]), judge)
