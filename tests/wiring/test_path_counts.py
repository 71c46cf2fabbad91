"""Numbers of paths of a model against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.train.models.resnet import resnet
from excite.wiring import Graph, path_count
from models import build, same_state, state_of


def neurons(layers: list[nn.Module], shape: tuple[int, ...]) -> Graph:
    """The graph of a chain of layers, number by number, found by feeding each layer with unit vectors."""
    names, weights = [f"0.{k}" for k in range(int(np.prod(shape)))], {}
    inputs = tuple(names)
    for depth, layer in enumerate(layers, 1):
        units = torch.eye(len(names), dtype=torch.float64).view(len(names), *shape)
        if isinstance(layer, nn.MaxPool2d):
            layer = nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding)
        with torch.no_grad():
            zero = layer(torch.zeros_like(units[:1]))
            out = layer(units) - zero
        shape = tuple(out.shape[1:])
        after = [f"{depth}.{k}" for k in range(int(np.prod(shape)))]
        for a, row in zip(names, out.flatten(1)):
            weights |= {(a, after[k]): float(row[k]) for k in row.nonzero().flatten().tolist()}
        names = after
    weights |= {(name, "end"): 1.0 for name in names}
    return Graph(inputs, "end", weights)


def test_paths_of_a_model_are_those_of_its_neurons() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2, padding=1), nn.AvgPool2d(2, 1),
              nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 2)]  # fmt: skip
    layers = [layer.double() for layer in layers]
    model = nn.Sequential(*itertools.chain(*((layer, nn.ReLU()) for layer in layers)))
    x = torch.randn(3, 2, 6, 5, dtype=torch.float64)
    found = path_count(model, x)
    assert found.total == neurons(layers, (2, 6, 5)).count
    assert len(found.log10_by_output) == 2


def test_counts_of_the_shared_table() -> None:
    model, x = build("mlp")
    before = state_of(model)
    assert path_count(model, x).total == 5 * 8 * 6
    assert same_state(before, state_of(model))
    # One path for every bias and what comes behind it: 8 · 6 for the first, 6, 1.
    assert path_count(model, x, biases=True).total == 5 * 8 * 6 + 8 * 6 + 6 + 1
    assert path_count(*build("functional")).total == 5 * 7
    assert path_count(*build("products")).total == 5 * 6
    # A block maps n paths a number to 4 · 9 … inside; identity and diagonal skips add one way, free ones 4.
    identity, diagonal = path_count(*build("resnet-identity")), path_count(*build("resnet-diagonal"))
    assert identity.total == diagonal.total < path_count(*build("resnet-free")).total
    assert path_count(*build("dense")).total > 0
    with pytest.raises(ModelError, match="no column"):
        path_count(*build("transformer"))
    with pytest.raises(ModelError, match="whole numbers"):
        path_count(*build("tokens"))
    with pytest.raises(ModelError, match="tanh"):
        path_count(*build("tanh"))


def test_a_residual_chain_by_hand() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)) for _ in range(3))
            self.head = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.relu(block(x) + x)
            return self.head(x)

    # n paths into each of 5 numbers: 5 · 7 · n through the block and n past it.
    assert path_count(Residual(), torch.randn(2, 5)).total == 5 * 36**3


@pytest.mark.slow
def test_networks_of_any_size() -> None:
    deep = nn.Sequential(*[nn.Linear(100, 100) for _ in range(300)])
    found = path_count(deep, torch.randn(2, 100))
    assert found.log10 == pytest.approx(602, abs=1e-9)
    assert found.total == float("inf")
    assert str(found) == "10^602.00 paths"
    assert path_count(resnet(stages=4, width=8), torch.randn(2, 3, 32, 32)).log10 > 30
