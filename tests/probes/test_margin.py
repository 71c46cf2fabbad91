"""The probe of margins against distances in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite import InputError
from excite.probes import Every, Margin
from excite.probes.base import StepContext


def test_margins_of_a_linear_model_are_hyperplane_distances() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    with torch.no_grad():
        scores = model(x)[:, 0] - 0.5
        distances = scores.abs() / model.weight.norm(1)  # in the maximum norm
    y = (scores > 0).long()
    y[0] = 1 - y[0]  # misclassified: its margin is zero
    distances[0] = 0
    found = Margin(x, y).measure(StepContext(model, 0))
    assert found["median"] == pytest.approx(float(distances.quantile(0.5)), rel=1e-3)
    assert found["low"] == pytest.approx(float(distances.sort().values[1]), rel=1e-3)
    assert (found["misclassified"], found["censored"]) == (pytest.approx(1 / 12), 0)


def test_bad_batches_are_refused() -> None:
    assert Margin(torch.zeros(2, 1), torch.zeros(2)).schedule == Every(500)
    with pytest.raises(InputError, match="one label each"):
        Margin(torch.zeros(2, 1), torch.zeros(3))
