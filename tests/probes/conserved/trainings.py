"""Networks, optimizers and short trainings for the tests of conserved quantities."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from excite.probes import conservation
from models import build


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        noise = torch.randn(x.shape, generator=generator).to(x.dtype) if x.is_floating_point() else 0
        optimizer.zero_grad()
        squared(model, x + noise).backward()
        optimizer.step()


def squared(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
    return sum(((part - 1).square().mean() for part in parts), torch.zeros((), dtype=torch.float64))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.01),
}


def snapshot(model: nn.Module, grads: bool = False) -> dict[str, Tensor]:
    return {k: (p.grad if grads else p).detach().clone() for k, p in model.named_parameters()}  # type: ignore[union-attr]


def hidden_laws(model: nn.Sequential, weights: dict[str, Tensor]) -> list[Tensor]:
    """diag(W₁W₁' + b b') − diag(W₂'W₂) between consecutive linear layers, from the matrices themselves."""
    names = [name for name, m in model.named_children() if isinstance(m, nn.Linear)]
    laws = []
    for one, other in pairwise(names):
        w = weights[f"{one}.weight"]
        made = w @ w.T
        if f"{one}.bias" in weights:
            made = made + torch.outer(weights[f"{one}.bias"], weights[f"{one}.bias"])
        laws.append((made - weights[f"{other}.weight"].T @ weights[f"{other}.weight"]).diagonal())
    return laws


PARTS = ("step", "decay", "momentum", "rescaling")


def followed(steps: int, look: Any) -> list[Any]:
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    ledger = conservation(model, optimizer, x)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found.append(look(ledger))
    return found
