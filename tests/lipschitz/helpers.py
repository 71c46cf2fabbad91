"""Small models of the tests of Lipschitz constants."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from models import CASES

SMOOTH = {"tanh": "tanh", "layernorm": "layer_norm", "groupnorm": "group_norm", "transformer": "transformer",
          "transformer-dropout": "transformer", "transformer-time-first": "attention", "heads": "attention", "gated": "mul",
          "recurrent": "tanh", "in-place": "tanh"}  # fmt: skip


LINEAR = [n for n, case in CASES.items() if not case.tokens and n not in {*SMOOTH, "papers"}]


# Of the others no bound is known: see test_upper.
SMALL = [n for n in LINEAR if not n.startswith(("resnet", "instancenorm", "written", "patches"))]


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


class Odd(nn.Module):
    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "product":
            return x * x.relu()
        if self.what == "quotient":
            return x.relu() / (2 + x.abs())
        if self.what == "time first":
            return x.T.relu().T[:, :1]
        if self.what == "custom":
            return torch.lgamma(x.abs() + 1)
        if self.what == "weights":  # smooth in its weights alone
            return torch.where(x > 1, 2 * x, x + 1) * self.scale.exp() / self.scale.sigmoid()
        return torch.maximum(x, -2 * x).max(1).values


class Layout(nn.Module):
    """(B, T, D) to (B, 1): ReLU layers on every time step, with the batch elsewhere than in front."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        times, batch = x.shape[1], x.shape[0]
        h = {"time first": x.transpose(0, 1), "merged": x.transpose(0, 1).reshape(times * batch, -1), "batch first": x}[
            self.how
        ]
        h = torch.relu(self.second(torch.relu(self.first(h))))
        if self.how == "merged":
            h = h.reshape(times, batch, -1)
        return self.head(h.mean(1 if self.how == "batch first" else 0))
