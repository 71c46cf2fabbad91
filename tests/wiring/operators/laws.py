"""What the rules of a family do to a model: its laws, its bound, its paths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from excite.lipschitz import bound, local
from excite.wiring import trace


class Between(nn.Module):
    """A linear layer, a function, a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], after: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.function, self.b = nn.Linear(4, 6), function, nn.Linear(after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def between(function: Callable[[Tensor], Tensor], after: int = 6) -> nn.Module:
    return Between(function, after).double()


def law(function: Callable[[Tensor], Tensor], after: int = 6) -> str:
    """The law of the channels between the two layers."""
    return trace(between(function, after), X).groups[0].law


def tightness(function: Callable[[Tensor], Tensor], after: int = 6) -> float:
    """The largest local constant over the bound, both in the 2-norm: at most 1."""
    model = between(function, after)
    points = 3 * torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return float(local(model, points).max()) / bound(model, X, "2").value
