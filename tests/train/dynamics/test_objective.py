"""The loss as a function of the flat vector of trained parameters."""

from __future__ import annotations

import torch

from excite.train import FlowResult, gradient_flow
from train.dynamics.flow_networks import data, logistic, network


def test_frozen_parameters_stay() -> None:
    x, y = data()
    model = network(3, 4, 1, relu=True)
    model[0].weight.requires_grad_(False)
    course: FlowResult = gradient_flow(model, logistic(x, y), 2.0)
    assert torch.equal(course.model[0].weight, model[0].weight)  # type: ignore[union-attr]
    assert not torch.equal(course.model[2].weight, model[2].weight)  # type: ignore[union-attr]
