"""Numbers of paths along a graph, in floating point with an exponent of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGE = 2.0**400  # beyond, counts are divided by a power of two


@dataclass(frozen=True)
class ScaledCounts:
    """The number of paths to every element of a tensor: values · 2^power."""

    values: Tensor
    power: int = 0

    def at(self, power: int) -> Tensor:
        """The counts as multiples of 2^power."""
        return self.values * 2.0 ** (self.power - power)

    def through(self, change: Callable[[Tensor], Tensor]) -> ScaledCounts:
        """The counts behind a linear map without negative weights, rescaled where they get large."""
        values, power = change(self.values), self.power
        if values.numel() and float(values.max()) > _LARGE:
            step = math.frexp(float(values.max()))[1]
            values, power = values * 2.0**-step, power + step
        return ScaledCounts(values, power)

    def plus_one(self) -> ScaledCounts:
        """One more path to every element: that of a bias."""
        return total([self, ScaledCounts(torch.ones_like(self.values))])


@dataclass(frozen=True)
class PathContext:
    """`biases`: whether every bias is one more input."""

    biases: bool


def total(counts: Sequence[ScaledCounts]) -> ScaledCounts:
    """The sum of several counts, with broadcasting."""
    power = max(count.power for count in counts)
    result = counts[0].at(power)
    for count in counts[1:]:
        result = result + count.at(power)
    return ScaledCounts(result, power)
