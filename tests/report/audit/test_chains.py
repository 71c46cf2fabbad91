"""Weights of linear chains; other models are refused."""

import pytest
import torch
from torch import nn

from excite import ModelError
from excite.report.audit.chains import linear_chain


def test_a_linear_chain_is_its_weights():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2, bias=False)).double()
    x = torch.randn(5, 2, 2, dtype=torch.float64)
    (a, b), (c, none) = linear_chain(model, x)
    assert none is None
    assert torch.allclose((x.flatten(1) @ a.T + b) @ c.T, model(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
        nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()),
        nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten()),
        nn.Sequential(nn.Hardtanh(), nn.Linear(2, 1)),
    ],
)
def test_other_models_are_refused_even_if_linear_near_the_points(model):
    model = model.double()
    x = torch.full((4, 2), 0.1, dtype=torch.float64)
    if isinstance(model[0], nn.Linear) and len(model) == 3:
        nn.init.constant_(model[0].bias, 10.0)  # the ReLU does nothing near x
    if isinstance(model[0], nn.Conv1d):
        x = x[:, None]
    with pytest.raises(ModelError, match="linear layer"):
        linear_chain(model, x)
