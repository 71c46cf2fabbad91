"""Activations and their derivatives against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.train.vectorized.activations import Activation

MODULES = [nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.Sigmoid(), nn.ELU(0.7), nn.Softplus(2.0), nn.SiLU(), nn.GELU(), nn.GELU("tanh")]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_value_and_derivative_as_autograd(module: nn.Module) -> None:
    activation = Activation.of(module)
    assert activation is not None
    z = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    g = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = module(z)
    (pulled,) = torch.autograd.grad(expected, z, g)
    value, out = torch.empty(50, dtype=torch.float64), torch.empty(50, dtype=torch.float64)
    with torch.no_grad():
        activation.apply(z, value)
        activation.pull(g, z, value, out)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(out, pulled)


def test_other_modules_are_no_activations() -> None:
    assert Activation.of(nn.Linear(2, 2)) is None
    assert Activation.of(nn.Softmax(1)) is None
