"""The loss as a function of the flat vector of trained parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.errors import InputError
from excite.train import FlowResult, descent, gradient_flow
from train.dynamics.flow_networks import data, logistic, network


def test_frozen_parameters_stay() -> None:
    x, y = data()
    model = network(3, 4, 1, relu=True)
    model[0].weight.requires_grad_(False)
    course: FlowResult = gradient_flow(model, logistic(x, y), 2.0)
    assert torch.equal(course.model[0].weight, model[0].weight)  # type: ignore[union-attr]
    assert not torch.equal(course.model[2].weight, model[2].weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "follow",
    [lambda model, loss: gradient_flow(model, loss, 0.01, at=2), lambda model, loss: descent(model, loss, 2)],
    ids=["gradient_flow", "descent"],
)
def test_losses_that_draw_random_numbers_are_refused(follow):
    """Also where the numbers happen to make no difference at the start; the global random state stays as it was."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), torch.randn(4, 3, dtype=torch.float64)

    def drawing(model):
        return model(x).square().mean() + 0 * torch.rand(())

    def seeded(model):
        torch.manual_seed(1)
        return model(x + torch.randn(4, 3, dtype=torch.float64)).square().mean()

    before = torch.get_rng_state()
    with pytest.raises(InputError, match="draws random numbers"):
        follow(model, drawing)
    follow(model, seeded)
    assert torch.equal(torch.get_rng_state(), before)
