"""Modules that are affine between ReLUs, taken apart: signals, gradients and paths against the module itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.wiring.decomposition import decompose
from excite.wiring.piecewise import piecewise_linear
from models import same_state, state_of


class Block(nn.Module):
    """A convolution, a residual block with normalization, average pooling and a linear layer; ReLUs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.norm = (
            nn.Conv1d(1, 2, 3, padding=1),
            nn.Conv1d(2, 2, 3, padding=1),
            nn.BatchNorm1d(2),
        )
        self.act, self.pool, self.last = nn.ReLU(inplace=True), nn.AvgPool1d(2), nn.Linear(4, 1)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        return self.last(self.pool(x + self.act(self.norm(self.inner(x)))).flatten(1))


MODELS = {
    "block": lambda: Block(),
    "fully connected": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)
    ),
    "leaky": lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(6, 1, bias=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_signals_gradients_and_paths_are_the_modules(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(5, 1, 4, dtype=torch.float64, requires_grad=True)
    before = state_of(model)
    net = piecewise_linear(model, x.detach())
    assert same_state(before, state_of(model))
    assert model.training
    model.eval()
    values = model(x)
    (gradient,) = torch.autograd.grad(values.sum(), x)
    outputs, gates = net.signals(x)
    torch.testing.assert_close(outputs[-1], values.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(net.gradients(gates), gradient.flatten(1), rtol=0, atol=1e-14)
    parts = decompose(net.graph())
    for point, value in zip(x.detach().flatten(1).tolist(), values.detach()[:, 0].tolist()):
        assert net.graph().value([*point, 1.0]) == pytest.approx(value, abs=1e-13)
        assert parts.value([*point, 1.0]) == pytest.approx(value, abs=1e-12)


def test_a_skip_is_a_map_from_an_earlier_stage() -> None:
    net = piecewise_linear(Block(), torch.randn(2, 1, 4))
    assert set(net.maps) == {(1, 0), (2, 1), (3, 1), (3, 2)}
    assert net.sizes == (4, 8, 8, 1)


class Gated(nn.Module):
    """Multiplies two affine functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        nn.Sequential(
            nn.Linear(3, 4), nn.ReLU(), nn.Unflatten(1, (1, 4)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(2, 1)
        ),
        nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()),
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)),
        Gated(),
    ],
    ids=["tanh", "max pooling", "sigmoid", "layer norm", "gated"],
)
def test_what_is_not_affine_between_relus_is_refused(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="not affine"):
        piecewise_linear(model, torch.randn(2, 3))
