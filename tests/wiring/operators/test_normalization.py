"""Normalizations: the law in front of them, their constants and paths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.lipschitz import bound, local
from excite.wiring import path_count, trace

NORMS = {"batch": nn.BatchNorm1d(6), "layer": nn.LayerNorm(6), "group": nn.GroupNorm(2, 6)}


@pytest.mark.parametrize("name", NORMS)
def test_what_is_normalized_conserves_its_norm(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), NORMS[name], nn.ReLU(), nn.Linear(6, 1))
    groups = trace(model, torch.zeros(2, 4)).groups
    assert [(group.law, group.norms) for group in groups] == [("norm", ("1",)), ("channel", ())]
    assert path_count(model, torch.zeros(2, 4)).total == 24
    assert path_count(model, torch.zeros(2, 4), biases=True).total == 24 + 6 + 6 + 1


def test_batch_normalization_is_affine_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4)).double()
    model[0].running_var.copy_(torch.tensor([0.25, 1.0, 4.0, 9.0]))
    x = torch.zeros(2, 4, dtype=torch.float64)
    assert bound(model, x, "2").value == pytest.approx(float(local(model, x)[0]), rel=1e-12)
