"""Small networks and losses for the tests of gradient flow and descent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn


def network(*widths: int, relu: bool, seed: int = 0) -> nn.Sequential:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=False), nn.ReLU() if relu else nn.Identity()]
    torch.set_rng_state(state)
    return nn.Sequential(*layers[:-1]).double()


def data(n: int = 12, d: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    return x, torch.sign(x @ torch.randn(d, generator=g, dtype=torch.float64))


def logistic(x: Tensor, y: Tensor):
    return lambda m: nn.functional.softplus(-y * m(x)[:, 0]).mean()


def conserved(m: nn.Sequential) -> Tensor:
    one, two = m[0].weight, m[2].weight
    return one @ one.T - two.T @ two


class Valley(nn.Module):
    def __init__(self, w: float, v: float) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.tensor(w).double()), nn.Parameter(torch.tensor(v).double())


READ = {"w": lambda m: m.w, "v": lambda m: m.v}


def residual(seed: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A residual ReLU network with 174 weights, as its loss sees 30 points."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(4, 6, bias=False)
            self.inner = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))
            self.leave = nn.Linear(6, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enter(x).relu()
            for i in (0, 2):
                h = (h + self.inner[i + 1](self.inner[i](h).relu())).relu()
            return self.leave(h)[:, 0]

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Residual().double()
    x, y = torch.randn(30, 4).double(), torch.randn(30).double()
    torch.set_rng_state(state)
    return model, lambda m: (m(x) - y).square().mean()


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def plain(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], time: float, **settings: float
) -> tuple[np.ndarray, int]:
    """The same flow by scipy alone, which knows nothing of kinks; and how many gradients it took."""
    model = copy.deepcopy(model)

    def slope(_: float, point: np.ndarray) -> np.ndarray:
        nn.utils.vector_to_parameters(torch.from_numpy(point.copy()), model.parameters())
        return -torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(model), list(model.parameters()))]).numpy()

    found = solve_ivp(slope, (0.0, time), flat(model), method="DOP853", **settings)
    return found.y[:, -1], found.nfev
