"""A ReLU network is recognised however it is written, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite.bounds.relu_network import relu_network
from excite.errors import ExciteError, InputError, ModelError
from models import CASES, Functional, build, same_state, state_of


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(1, 6))

    def forward(self, x):
        return (x @ self.first).clamp(min=0) @ self.second.T


def sequential(*between):
    return nn.Sequential(nn.Linear(5, 6), *between, nn.Linear(6, 1))


ACCEPTED = {
    "module": lambda: sequential(nn.ReLU()),
    "in place": lambda: sequential(nn.ReLU(inplace=True)),
    "dropout": lambda: sequential(nn.ReLU(), nn.Dropout(0.5)),
    "flat output": lambda: nn.Sequential(nn.Flatten(), *sequential(nn.ReLU()), nn.Flatten(0)),
    "functional": Functional,
    "products": Products,
    "deep": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_weights_give_what_the_module_gives(name):
    torch.manual_seed(0)
    model = ACCEPTED[name]().double().train()
    x = torch.randn(7, 5, dtype=torch.float64)
    before = state_of(model)
    network = relu_network(model, x)
    assert same_state(before, state_of(model))
    model.eval()
    more = 10 * torch.randn(50, 5, dtype=torch.float64)
    assert torch.allclose(network.signals(more)[-1], model(more).reshape(50, -1).detach(), rtol=1e-12, atol=1e-12)


class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) / 5


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.b(x + F.relu(self.a(x)))


REFUSED = {
    "leaky": lambda: sequential(nn.LeakyReLU(0.01)),
    "tanh": lambda: sequential(nn.Tanh()),
    "capped": lambda: sequential(nn.ReLU6()),
    "linear": lambda: sequential(),
    "normalized": lambda: sequential(nn.LayerNorm(6), nn.ReLU()),
    "sigmoid": lambda: nn.Sequential(sequential(nn.ReLU()), nn.Sigmoid()),
    "last ReLU": lambda: nn.Sequential(sequential(nn.ReLU()), nn.ReLU()),
    "scaled": lambda: Scaled(sequential(nn.ReLU())),
    "scaled input": lambda: nn.Sequential(nn.BatchNorm1d(5), sequential(nn.ReLU())),
    "skip": Skip,
    "one layer": lambda: nn.Linear(5, 1),
    "no layer": nn.ReLU,
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 1)
    ),
    "tied": lambda: (lambda a: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), a, nn.ReLU(), a, nn.ReLU(), nn.Linear(6, 1)))(
        nn.Linear(6, 6)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused(name):
    torch.manual_seed(0)
    model = REFUSED[name]().double()
    x = torch.randn(7, 5, dtype=torch.float64)
    before = state_of(model)
    with pytest.raises(ModelError, match="expected"):
        relu_network(model, x)
    assert same_state(before, state_of(model))


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("functional", "dropout") and not CASES[n].tokens])
def test_of_the_table_of_models_only_two_are_relu_networks(name):
    model, x = build(name)
    with pytest.raises(ExciteError):
        relu_network(model, x)


def test_plain_weights_are_checked():
    x = torch.randn(4, 2)
    V, b, W = torch.randn(3, 2), torch.randn(3), torch.randn(1, 3)
    assert len(relu_network([(V, b), (W, None)], x).weights) == 2
    for pairs, match in (
        ([(V.T, b), (W, None)], "weight"),
        ([(V, b[:2]), (W, None)], "bias"),
        ([(V, b), (W.T, None)], "layer 2"),
        ([V, W], "pairs"),
        ([(V * torch.nan, b), (W, None)], "finite"),
    ):
        with pytest.raises(InputError, match=match):
            relu_network(pairs, x)
    with pytest.raises(InputError, match="finite"):
        relu_network([(V, b), (W, None)], x / 0)
    with pytest.raises(InputError, match="points"):
        relu_network([(V, b), (W, None)], x[0])
    with pytest.raises(ModelError, match="two linear layers"):
        relu_network([(V, b)], x)
    with pytest.raises(ModelError, match="check that it takes inputs of this shape"):
        relu_network(sequential(nn.ReLU()), x)
