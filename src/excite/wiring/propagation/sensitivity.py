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

    In the 2-norm, by `factor` as a whole. In the infinity norm each element on its own, by `spread`; `factor` is then
    the largest of these. Following the elements is what makes the bound for the infinity norm much smaller than the
    product of the layers' norms, and it is just as safe: |Σ w δ| ≤ Σ |w| |δ|.
    """

    factor: float
    shape: tuple[int, ...]
    spread: Tensor | None = None

    @classmethod
    def from_spread(cls, spread: Tensor) -> Sensitivity:
        """In the infinity norm, from how far each element can move."""
        return cls(float(spread.max()) if spread.numel() else 0.0, tuple(spread.shape), spread)


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
        what: str,
        factor: Callable[[], float],
        spread: Callable[[Tensor], Tensor],
    ) -> Sensitivity:
        """The sensitivity of the result of `node`: `factor` is the constant of the map in the 2-norm, `spread` what it does to |δ|."""
        if x.spread is None:
            growth = factor()
            result = Sensitivity(x.factor * growth, first_shape(node))
        else:
            with torch.no_grad():
                result = Sensitivity.from_spread(spread(x.spread))
            growth = result.factor / x.factor if x.factor else 1.0
        if abs(growth - 1.0) > 1e-12:
            self.terms.append((what, growth))
        return result

    def combine(
        self, node: torch.fx.Node, what: str, factor: Callable[[], float], spread: Callable[[], Tensor]
    ) -> Sensitivity:
        """Several branches in one tensor."""
        result = Sensitivity(factor(), first_shape(node)) if self.norm == "2" else Sensitivity.from_spread(spread())
        self.terms.append((what, result.factor))
        self.branches = True
        return result


def no_bound(node: torch.fx.Node, what: str) -> ModelError:
    """The error of a call whose Lipschitz constant is not known for its arguments."""
    module = module_of(node)
    return ModelError(f"{NO_BOUND} {what}" + (f" (in {module})" if module else ""))
