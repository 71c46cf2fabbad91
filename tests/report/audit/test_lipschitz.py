"""Lipschitz constants of an audit: of a linear model they are its norm everywhere."""

import pytest
import torch
from torch import nn

from excite.report.audit.lipschitz import lipschitz_constants


def test_a_linear_model_has_one_constant_everywhere():
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    constants = lipschitz_constants(model, {"train": torch.eye(2, dtype=torch.float64)}, "2")
    assert constants.median("train") == pytest.approx(5)
    assert constants.largest == pytest.approx(5)
    assert constants.guaranteed == pytest.approx(5)


def test_token_ids_have_no_constants():
    constants = lipschitz_constants(nn.Embedding(5, 2), {"train": torch.tensor([[1], [2]])}, "2")
    assert constants.local == {}
    assert "no derivative" in constants.why
