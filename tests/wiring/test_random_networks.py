"""Random networks with every kind of connection: whatever law is claimed must hold."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.wiring import trace

from .test_laws import check_gradients, check_symmetry

WIDTH = 4


class Random(nn.Module):
    """A program over tensors (B, 4), drawn from a seed; all of them are read in the end."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.program: list[tuple[str, int, int, str]] = []
        self.parts = nn.ModuleDict({"enter": nn.Linear(3, WIDTH)})
        self.scales = nn.ParameterDict()
        self.shared = nn.Linear(WIDTH, WIDTH)
        kinds = ["linear", "linear", "shared", "relu", "relu", "leaky", "tanh", "add", "add", "add", "product", "scale",
                 "swap", "norm", "negative", "maximum", "narrow", "gate", "input", "mean", "dropout"]  # fmt: skip
        for i in range(draw.randint(4, 10)):
            kind = draw.choice(kinds)
            name = f"p{i}"
            if kind == "linear":
                self.parts[name] = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
            elif kind == "narrow":
                self.parts[name] = nn.Linear(WIDTH // 2, WIDTH)
            elif kind == "norm":
                self.parts[name] = nn.LayerNorm(WIDTH) if draw.random() < 0.5 else nn.BatchNorm1d(WIDTH)
            elif kind == "scale":
                self.scales[name] = nn.Parameter(torch.rand(draw.choice([1, WIDTH])) + 0.5)
            self.program.append((kind, draw.randint(0, i), draw.randint(max(0, i - 1), i), name))
        self.parts["leave"] = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.parts["enter"](x)]
        for kind, i, j, name in self.program:
            a, b = values[i], values[j]
            values.append(self.step(kind, a, b, name, x))
        return self.parts["leave"](values[-1])

    def step(self, kind: str, a: Tensor, b: Tensor, name: str, x: Tensor) -> Tensor:
        if kind in ("linear", "norm"):
            return self.parts[name](b)
        simple = {
            "shared": lambda: self.shared(b),
            "relu": lambda: F.relu(b),
            "leaky": lambda: F.leaky_relu(b, 0.3),
            "tanh": lambda: torch.tanh(b),
            "add": lambda: a + 0.5 * b,
            "product": lambda: a * b,
            "scale": lambda: self.scales[name] * b,
            "swap": lambda: torch.cat([b[:, 2:], a[:, :2]], 1),
            "negative": lambda: -b,
            "maximum": lambda: torch.maximum(a, b),
            "narrow": lambda: self.parts[name](b[:, ::2]),
            "gate": lambda: torch.sigmoid(a) * b,
            "input": lambda: b * x[:, :1],
            "mean": lambda: b + a.mean(1, keepdim=True),
            "dropout": lambda: F.dropout(b, 0.2),
        }
        return simple[kind]()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_whatever_law_is_claimed_holds(seed: int) -> None:
    torch.manual_seed(seed)
    model = Random(seed).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-13
    groups = trace(model, x).groups
    check_symmetry(model, x, groups)
    check_gradients(model, x, groups)


def test_most_random_networks_have_a_law() -> None:
    found = []
    for seed in range(10):
        torch.manual_seed(seed)
        found += [group.law for group in trace(Random(seed), torch.randn(5, 3)).groups]
    assert {"matrix", "channel", "norm", "none"} <= set(found)
    assert found.count("none") < len(found) / 2
