"""Straight lines below and above elementwise activations on an interval.

    k t + a ≤ g(t) ≤ k' t + b    for l ≤ t ≤ u

For a slope k the best constant is the extreme of g(t) − k t. For piecewise-linear g it is attained at a kink or an end. For smooth
g it is looked for on a grid, and the error of that is bounded by the second derivative: |g''| h² / 8 with the spacing h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_GRID = 24


@dataclass(frozen=True)
class ActivationShape:
    """An elementwise function with kinks, or with a bound on its second derivative.

    Attributes:
        kinks: from the arguments after the first; None where the function is smooth.
        curvature: bound on |g''| from the same arguments; None where the function is piecewise linear.
        applies: whether bounds are known for these arguments.
        monotone: whether the function grows everywhere, so that its range is given by the ends.
    """

    kinks: Callable[..., tuple[float, ...]] | None = None
    curvature: Callable[..., float] | None = None
    applies: Callable[..., bool] = lambda *args: all(isinstance(arg, int | float | str | None) for arg in args)
    monotone: bool = True


@dataclass(frozen=True)
class Lines:
    """Slopes and constants of a line below and of one above, each (N, ...)."""

    below_slope: Tensor
    below: Tensor
    above_slope: Tensor
    above: Tensor

    def rows(self, index: Tensor) -> Lines:
        """Those of some of the points."""
        return Lines(self.below_slope[index], self.below[index], self.above_slope[index], self.above[index])


def _ends(low: float | None = None, high: float | None = None) -> tuple[float, ...]:
    return tuple(float(end) for end in (low, high) if end is not None)


ACTIVATIONS = {
    "relu": ActivationShape(kinks=lambda: (0.0,)),
    "leaky_relu": ActivationShape(kinks=lambda slope=0.01: (0.0,), monotone=False),
    "abs": ActivationShape(kinks=lambda: (0.0,), monotone=False),
    "clamp": ActivationShape(kinks=_ends),
    "clamp_min": ActivationShape(kinks=lambda low: (float(low),)),
    "clamp_max": ActivationShape(kinks=lambda high: (float(high),)),
    "hardtanh": ActivationShape(kinks=lambda low=-1.0, high=1.0: (float(low), float(high))),
    "hardsigmoid": ActivationShape(kinks=lambda: (-3.0, 3.0)),
    "tanh": ActivationShape(curvature=lambda: 0.77),
    "sigmoid": ActivationShape(curvature=lambda: 0.0963),
    "gelu": ActivationShape(curvature=lambda: 0.798, monotone=False, applies=lambda *args: not args),
    "silu": ActivationShape(curvature=lambda: 0.5, monotone=False),
    "softplus": ActivationShape(curvature=lambda: 0.25, applies=lambda *args: not args),
    "elu": ActivationShape(curvature=lambda: 1.0, applies=lambda *args: not args),
}


def interval(
    activation: ActivationShape, g: Callable[[Tensor], Tensor], rest: tuple[Any, ...], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of g between `low` and `high`."""
    if activation.monotone:
        return g(low), g(high)
    zero = torch.zeros_like(low)
    minimum, maximum, tolerance = _extremes(activation, g, rest, zero, low, high)
    return minimum - tolerance, maximum + tolerance


def lines(
    activation: ActivationShape, g: Callable[[Tensor], Tensor], rest: tuple[Any, ...], low: Tensor, high: Tensor
) -> Lines:
    """The lines, of the slopes at hand, that are best in the middle of the interval. An interval of length zero has a tangent."""
    width = (high - low).clamp_min(1e-12)
    chord = (g(high) - g(low)) / width
    middle = (low + high) / 2
    slopes = [chord, *_tangents(g, (low, middle, high))]
    best: list[Tensor] | None = None
    for slope in slopes:
        minimum, maximum, tolerance = _extremes(activation, g, rest, slope, low, high)
        below, above = minimum - tolerance, maximum + tolerance
        if best is None:
            best = [slope, below, slope, above]
            continue
        better = slope * middle + below > best[0] * middle + best[1]
        best[0], best[1] = torch.where(better, slope, best[0]), torch.where(better, below, best[1])
        better = slope * middle + above < best[2] * middle + best[3]
        best[2], best[3] = torch.where(better, slope, best[2]), torch.where(better, above, best[3])
    assert best is not None
    return Lines(*best)


def _tangents(g: Callable[[Tensor], Tensor], at: tuple[Tensor, ...]) -> list[Tensor]:
    tangents = []
    for point in at:
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            (slope,) = torch.autograd.grad(g(leaf).sum(), leaf)
        tangents.append(slope)
    return tangents


def _extremes(
    activation: ActivationShape,
    g: Callable[[Tensor], Tensor],
    rest: tuple[Any, ...],
    slope: Tensor,
    low: Tensor,
    high: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest and the largest g(t) − slope · t, and how far a value between grid points may lie beyond them."""
    if activation.kinks is not None:
        points = [low, high, *(torch.full_like(low, kink).clamp(low, high) for kink in activation.kinks(*rest))]
        tolerance = torch.zeros_like(low)
    else:
        assert activation.curvature is not None
        points = [low + (high - low) * (i / _GRID) for i in range(_GRID + 1)]
        tolerance = activation.curvature(*rest) * ((high - low) / _GRID) ** 2 / 8
    minimum = maximum = g(low) - slope * low
    for point in points[1:]:
        value = g(point) - slope * point
        minimum, maximum = torch.minimum(minimum, value), torch.maximum(maximum, value)
    return minimum, maximum, tolerance
