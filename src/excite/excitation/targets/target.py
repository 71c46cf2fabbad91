"""A target: how the outputs of a model are read, compared with labels and decided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.calls import Batch
from excite.excitation.direction import any_direction

Loss = Literal["squared", "cross-entropy"]


class Target(ABC):
    """A reading of the outputs. `errors` is per sample: the loss at radius 0 is its mean over the batch."""

    @abstractmethod
    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """The output of the model for `batch` samples as (B,) or (B, k); any other shape is refused."""

    @abstractmethod
    def labels(self, y: object, batch: int, deferred: DeferredChecks | None = None) -> Tensor:
        """The labels as (B,); others than this target knows are refused, with `deferred` without waiting for a GPU."""

    @abstractmethod
    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (B,)."""

    @abstractmethod
    def decide(self, output: Tensor) -> Tensor:
        """Labels, (B,)."""

    def start(self, output: Tensor) -> Tensor:
        """Where the search for the direction v begins, (B, k), of unit length."""
        return any_direction(output)

    @abstractmethod
    def trivial(self, labels: Tensor) -> Tensor:
        """The mean error of the best constant output on these labels: what a network that learned nothing has."""

    def mean_error(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss at radius 0, a scalar: the mean of the errors over the batch."""
        return self.errors(output, labels).mean()

    def mean_loss(self, losses: Tensor, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar: the mean of `losses(low, high, labels)` over the batch."""
        return losses.mean()

    def right(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """Whether each sample is decided rightly in the middle of its two extremes, (B,) of bool."""
        return self.decide((low + high) / 2) == labels

    def searches(self, x: Batch, labels: Tensor | None) -> tuple[Batch, Tensor | None]:
        """The searches for the batch x: samples, and the direction v of each; None leaves the direction to the search."""
        return x, None

    def losses(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """½ error(f(x; d1), y) + ½ error(f(x; d2), y) of each sample, (B,), from the outputs at the extremes of `searches`."""
        return 0.5 * (self.errors(high, labels) + self.errors(low, labels))

    def extremes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) or (B, k) each, from the outputs at the extremes of `searches(x, None)`."""
        return low, high
