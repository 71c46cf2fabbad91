"""Where perturbations may be: balls of a norm around each point, cut by the bounds on the input."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from excite._core.checks import Norm


def column(values: Tensor, like: Tensor) -> Tensor:
    """(N,) as (N, 1, ..., 1), to be broadcast against `like`."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def length(d: Tensor, norm: Norm) -> Tensor:
    """(N,): the norm of each row of d (N, ...)."""
    order = math.inf if norm == "inf" else float(norm)
    result: Tensor = torch.linalg.vector_norm(d.flatten(1), order, dim=1)
    return result


@dataclass(frozen=True)
class Room:
    """The perturbations d of N points with low ≤ d ≤ high, measured in `norm`.

    `low` and `high` are None when there are no bounds. They are rounded inwards, so that x + d never leaves the bounds
    in floating point either. `reach` (N,) is the norm of the largest perturbation worth looking at. `partly`: some
    coordinates have no bounds (infinite ones), so that there are no corners to go to.
    """

    norm: Norm
    low: Tensor | None
    high: Tensor | None
    reach: Tensor
    partly: bool = False

    @property
    def cap(self) -> Tensor:
        """(N,): the largest first radius; without bounds the reach is a million times what is usual."""
        return self.reach if self.low is not None and not self.partly else self.reach / 1e6

    def rows(self, index: Tensor) -> Room:
        if self.low is None or self.high is None:
            return replace(self, reach=self.reach[index])
        return replace(self, low=self.low[index], high=self.high[index], reach=self.reach[index])

    def length(self, d: Tensor) -> Tensor:
        return length(d, self.norm)

    def slope(self, gradient: Tensor) -> Tensor:
        """(N,): the dual norm of the gradients, the fastest change per unit of the norm."""
        return length(gradient, "1" if self.norm == "inf" else "2")

    def direction(self, gradient: Tensor) -> Tensor:
        """The perturbation of norm one along which a function with this gradient grows fastest."""
        if self.norm == "inf":
            return gradient.sign()
        return gradient / column(length(gradient, "2").clamp_min(torch.finfo(gradient.dtype).tiny), gradient)

    def graded(self, gradient: Tensor) -> Tensor:
        """The gradient, scaled to a root mean square of one ("inf") or to length one."""
        size = length(gradient, "2").clamp_min(torch.finfo(gradient.dtype).tiny)
        if self.norm == "inf":
            size = size / gradient.shape[1:].numel() ** 0.5
        return gradient / column(size, gradient)

    def clip(self, d: Tensor) -> Tensor:
        """d cut to the bounds."""
        if self.low is None or self.high is None:
            return d
        return torch.clamp(d, self.low, self.high)

    def open(self, gradient: Tensor, d: Tensor) -> Tensor:
        """The gradient without the coordinates in which descent from d would leave the bounds at once."""
        if self.low is None or self.high is None:
            return gradient
        stuck = torch.where(gradient > 0, d <= self.low, d >= self.high)
        return gradient.masked_fill(stuck, 0.0)

    def fit(self, d: Tensor, radius: Tensor) -> Tensor:
        """d brought into the ball of `radius` (N,), then into the bounds."""
        return self.clip(self.shrunk(d, radius))

    def shrunk(self, d: Tensor, radius: Tensor) -> Tensor:
        """The nearest perturbation of norm at most `radius`: coordinates are cut ("inf") or all scaled ("2").

        From radius = ‖d‖ down to 0 this is a path from d to zero that stays within the bounds if d does. Cutting leaves
        the coordinates that the bounds already hold back as they are; scaling them too would waste them.
        """
        if self.norm == "inf":
            edge = column(radius, d)
            return torch.clamp(d, -edge, edge)
        size = self.length(d).clamp_min(torch.finfo(d.dtype).tiny)
        return d * column((radius / size).clamp(max=1.0), d)


def make_room(x: Tensor, norm: Norm, bounds: tuple[Tensor, Tensor] | None) -> Room:
    """The room around x (N, ...). Without bounds the reach is a million times the spread of the data."""
    if bounds is None:
        spread = length(x - x.mean(0, keepdim=True), norm).max()
        size = torch.where(spread > 0, spread, length(x, norm).max()).clamp_min(1e-3)
        return Room(norm, None, None, (1e6 * size).expand(len(x)).contiguous())
    lowest, highest = (bound.expand_as(x) for bound in bounds)
    low, high = lowest - x, highest - x
    for _ in range(2):  # x + (high - x) can round past high
        high = torch.where(x + high > highest, torch.nextafter(high, torch.full_like(high, -math.inf)), high)
        low = torch.where(x + low < lowest, torch.nextafter(low, torch.full_like(low, math.inf)), low)
    high, low = high.clamp_min(0), low.clamp_max(0)
    return Room(norm, low, high, length(torch.maximum(high, -low), norm))
