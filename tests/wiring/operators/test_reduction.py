"""The Lipschitz constant of softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from excite.lipschitz import bound, local


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_softmax_is_at_most_half_as_steep_as_its_input(norm: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Softmax(-1)).double()
    limit = bound(model, torch.zeros(2, 4).double(), norm)
    x = 5 * torch.randn(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(local(model, x, norm).max()) <= limit.value
    y = x.roll(1, 0)
    with torch.no_grad():
        moved = torch.linalg.vector_norm(model(x) - model(y), ord=float(norm), dim=1)
    assert bool((moved <= limit.value * torch.linalg.vector_norm(x - y, ord=float(norm), dim=1)).all())


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_the_constant_of_softmax_is_reached(norm: str) -> None:
    model, x = nn.Softmax(-1), torch.zeros(2, 2, dtype=torch.float64)
    assert math.isclose(bound(model, x, norm).value, 0.5)
    assert math.isclose(float(local(model, x, norm)[0]), 0.5)


def test_softmax_is_bounded_by_the_largest_deviation() -> None:
    """Elements that move less have a smaller bound: ¼ (s_i + max s)."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Softmax(-1), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.5]]))
        model[2].weight.copy_(torch.tensor([[0.0, 1.0]]))
    x = torch.zeros(2, 2, dtype=torch.float64)
    assert math.isclose(bound(model, x, "inf").value, 0.25 * (0.5 + 1.0))
