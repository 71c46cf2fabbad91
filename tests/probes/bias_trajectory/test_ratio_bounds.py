"""Ratios and slopes of a pass against explicit matrices, and the bounds of Lemma 1."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.ratio_bounds import RatioBounds, largest, ratio_and_slope
from excite.probes.bias_trajectory.sites import find


def test_bounds_of_a_linear_layer_equal_those_of_its_matrix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    weight = model[0].weight.detach()
    site = find(model, torch.randn(5, 6, dtype=torch.float64)).first
    gradient = torch.randn(5, 4, dtype=torch.float64)
    gradient[0, 1] = gradient[3, 2] = 0  # inactive units
    errors = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.0], dtype=torch.float64)  # the last sample has no loss gradient
    updates, slopes, active = ratio_and_slope(site, gradient, errors)
    assert torch.equal(active, gradient != 0)
    for i in range(4):
        assert float(updates[i]) == pytest.approx(float(gradient[i].norm() / errors[i]))
        assert float(slopes[i]) == pytest.approx(float((gradient[i] @ weight).norm() / errors[i]))
    assert updates[4].isnan()

    values, estimated = RatioBounds.of(site, gradient, errors, LayerOperator(site)).result(vector=False)
    smallest = torch.stack([torch.linalg.svdvals(weight[rows])[-1] for rows in active])
    assert not estimated
    assert values["sigma"] == pytest.approx(float(torch.linalg.svdvals(weight)[0]))
    assert float(values["upper"]) == pytest.approx(float(updates.nanmean()) * values["sigma"])
    assert float(values["lower"]) == pytest.approx(float((updates * smallest).nanmean()))
    assert float(values["lipschitz_max"]) == pytest.approx(float(slopes[:4].max()))
    assert int(values["violations"]) == 0


def test_the_largest_value_ignores_nan() -> None:
    assert float(largest(torch.tensor([1.0, math.nan, -3.0]))) == 1
    assert largest(torch.tensor([math.nan, math.nan])).isnan()
