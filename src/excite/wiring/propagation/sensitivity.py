"""Lipschitz constants along a graph: how far every tensor can move when the model's input moves by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from excite.errors import ModelError
from excite.wiring.propagation.schema import first_shape, module_of

LipschitzNorm = Literal["inf", "2"]
NO_BOUND = "no Lipschitz bound known for"


@dataclass(frozen=True)
class Sensitivity:
    """How far a tensor can move when the model's input moves by one.

    In the 2-norm, by `factor` as a whole. In the infinity norm each element on its own, by `deviation`; `factor` is then
    the largest of these. Following the elements is what makes the bound for the infinity norm much smaller than the
    product of the layers' norms, and it is just as safe: |Σ w δ| ≤ Σ |w| |δ|.
    """

    factor: float
    shape: tuple[int, ...]
    deviation: Tensor | None = None

    @classmethod
    def from_deviation(cls, deviation: Tensor) -> Sensitivity:
        """In the infinity norm, from how far each element can move."""
        return cls(float(deviation.max()) if deviation.numel() else 0.0, tuple(deviation.shape), deviation)


class LipschitzContext:
    """The norm, and the terms of the bound so far."""

    def __init__(self, norm: LipschitzNorm):
        self.norm: LipschitzNorm = norm
        self.terms: list[tuple[str, float]] = []
        self.branches = False

    def apply(
        self,
        node: torch.fx.Node,
        x: Sensitivity,
        term: str,
        factor: Callable[[], float],
        deviation: Callable[[Tensor], Tensor],
    ) -> Sensitivity:
        """The sensitivity of the result of `node`: `factor` is the constant of the map in the 2-norm, `deviation` what it does to |δ|."""
        if x.deviation is None:
            growth = factor()
            result = Sensitivity(x.factor * growth, first_shape(node))
        else:
            with torch.no_grad():
                result = Sensitivity.from_deviation(deviation(x.deviation))
            growth = result.factor / x.factor if x.factor else 1.0
        if abs(growth - 1.0) > 1e-12:
            self.terms.append((term, growth))
        return result

    def combine(
        self, node: torch.fx.Node, term: str, factor: Callable[[], float], deviation: Callable[[], Tensor]
    ) -> Sensitivity:
        """Several branches in one tensor."""
        result = (
            Sensitivity(factor(), first_shape(node)) if self.norm == "2" else Sensitivity.from_deviation(deviation())
        )
        self.terms.append((term, result.factor))
        self.branches = True
        return result


def no_bound(node: torch.fx.Node, description: str) -> ModelError:
    """The error of a call whose Lipschitz constant is not known for its arguments."""
    module = module_of(node)
    return ModelError(f"{NO_BOUND} {description}" + (f" (in {module})" if module else ""))
