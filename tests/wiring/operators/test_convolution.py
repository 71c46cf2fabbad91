"""Convolutions: their norms against their matrices, their paths by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.lipschitz import bound, local
from excite.wiring import path_count, trace

LAYERS = {
    "plain": nn.Conv1d(2, 3, 3, padding=1),
    "grouped": nn.Conv1d(2, 4, 3, groups=2),
    "transposed": nn.ConvTranspose1d(2, 3, 2, stride=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_bound_of_a_small_convolution_is_exact(name: str) -> None:
    x = torch.zeros(2, 2, 5, dtype=torch.float64)
    model = nn.Sequential(LAYERS[name]).double()
    assert bound(model, x, "2").value == pytest.approx(float(local(model, x)[0]), rel=1e-12)


def test_paths_and_channels() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Conv1d(3, 1, 4))
    x = torch.zeros(2, 2, 5)
    assert path_count(model, x).total == 2 * 2 * 3 * 4
    assert trace(model, x).groups[0].channels == 3
