"""Trajectories of the bias of a layer in training: normalized updates, lengths, variance, distance.

The normalized update of a layer's bias for one point is ‖dL/dz‖ / |dL/df|, with z the layer's output and f the
network's: ‖b(t+1) − b(t)‖ / (lr · ε) at batch size one without momentum, as in Theorem 1 of *What training reveals*.
Points with dL/df = 0 are left out, as in the theorem, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from excite._core.checks import check_count


@dataclass(frozen=True)
class BiasTrajectory:
    """Trajectory of one layer's bias, for S networks and T windows of steps; float64, on the CPU.

    Attributes:
        mean: Mean of the normalized updates of a window's points, (S, T).
        max: Largest normalized update, (S, T).
        length: Sum of the normalized updates; every point counts as one step, (S, T).
        raw: Σ ‖b(t+1) − b(t)‖ over the steps, (S, T).
        zero: Number of points left out because their loss gradient is zero, (S, T).
        nonfinite: Number of points left out because their gradient is not finite, (S, T).
        bias: b at the start and at the end of each window, (S, T + 1, n).
        middle: Mean of b over the window, each step's b before its update, (S, T, n).
        spread: Mean of ‖b − middle‖² over the window, (S, T).
        counts: Number of steps of each window, (T,).

    Example:
        >>> models = [build("mlp", inputs=4, seed=seed) for seed in range(2)]
        >>> trajectory = ensemble(models, x, y, epochs=2, lr=0.01).trajectories[0]
        >>> trajectory.mean.shape
        torch.Size([2, 2])
    """

    mean: Tensor
    max: Tensor
    length: Tensor
    raw: Tensor
    zero: Tensor
    nonfinite: Tensor
    bias: Tensor
    middle: Tensor
    spread: Tensor
    counts: Tensor

    @property
    def total(self) -> Tensor:
        """Length from the start to the end of each window, (S, T) (figure 7)."""
        return self.length.cumsum(1)

    @property
    def distance(self) -> Tensor:
        """‖b − b(0)‖ at the end of each window, (S, T) (Corollary 3)."""
        moved: Tensor = (self.bias[:, 1:] - self.bias[:, :1]).norm(dim=2)
        return moved

    def variance(self, last: int) -> Tensor:
        """Variance avg ‖b(t) − avg b‖² over the steps of the last windows (Corollary 2).

        Args:
            last: Number of windows.

        Returns:
            One number per network, (S,).
        """
        last = check_count(last, "last", 1, len(self.counts))
        weights = self.counts[-last:].double() / self.counts[-last:].sum()
        middle = self.middle[:, -last:]
        mean = torch.einsum("t,stn->sn", weights, middle)
        between = (middle - mean[:, None]).square().sum(2)
        return (self.spread[:, -last:] + between) @ weights


@dataclass(frozen=True)
class Piece:
    """The same for one window, without an axis for windows."""

    mean: Tensor
    max: Tensor
    length: Tensor
    raw: Tensor
    zero: Tensor
    nonfinite: Tensor
    bias: Tensor
    middle: Tensor
    spread: Tensor

    @classmethod
    def of(cls, d: Tensor, slope: Tensor, real: Tensor, biases: Tensor) -> Piece:
        """Sums over a few steps.

        d (K, S, B, n): dL/dz; slope (K, S, B): |dL/df|, times the same factor; real (K, B): false for points that only fill up a batch;
        biases (K + 1, S, n).
        """
        real, wide = real[:, None], slope.double()  # (K, 1, B), (K, S, B)
        ratio = d.double().norm(dim=3) / wide
        counted = real & (wide > 0) & ratio.isfinite()
        zero = (real & (wide == 0)).sum((0, 2))
        ratio = torch.where(counted, ratio, 0.0)
        number = counted.sum((0, 2))  # (S,)
        length = ratio.sum((0, 2))
        b = biases.double()
        steps = b[1:] - b[:-1]
        middle = b[:-1].mean(0)
        return cls(
            mean=length / number,  # not a number where there are none
            max=ratio.amax((0, 2)).masked_fill(number == 0, torch.nan),
            length=length,
            raw=steps.norm(dim=2).sum(0),
            zero=zero,
            nonfinite=real.sum() - number - zero,
            bias=b[-1].clone(),  # the buffer is written again
            middle=middle,
            spread=(b[:-1] - middle).square().sum(2).mean(0),
        )


class TrajectoryRecord:
    """Storage of the pieces of all windows, allocated once: small tensors between large ones would fragment memory."""

    def __init__(self, start: Tensor, windows: int):
        self.start = start.double().cpu().clone()  # the weights are trained in place
        self._windows = windows
        self._columns: dict[str, Tensor] = {}

    def put(self, window: int, piece: Piece) -> None:
        """Stores the values of one window."""
        for field in fields(piece):
            value = getattr(piece, field.name)
            if field.name not in self._columns:
                self._columns[field.name] = value.new_zeros((self._windows, *value.shape))
            self._columns[field.name][window].copy_(value)

    def trajectory(self, counts: Sequence[int]) -> BiasTrajectory:
        """Builds the trajectory from all windows."""
        columns = {name: values.transpose(0, 1).contiguous().cpu() for name, values in self._columns.items()}
        columns["bias"] = torch.cat([self.start[:, None], columns["bias"]], 1)
        return BiasTrajectory(**columns, counts=torch.tensor(counts))
