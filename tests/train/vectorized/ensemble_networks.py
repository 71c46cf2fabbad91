"""Networks for the tests of ensembles."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def mlp(sizes: tuple[int, ...], act: nn.Module | None = None, seed: int = 0, **how: Any) -> nn.Sequential:
    """how: fixed (identity or random first weight), bias, sigmoid, dtype."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b, bias=how.get("bias", True)), copy.deepcopy(act) or nn.ReLU()]
    model = nn.Sequential(*layers[:-1], *([nn.Sigmoid()] if how.get("sigmoid") else []))
    if how.get("fixed"):
        first = model[0]
        first.weight.requires_grad_(False)
        if how["fixed"] == "identity":
            first.weight.copy_(torch.eye(sizes[0]))
    return model.to(how.get("dtype", torch.float64))


def close(a: Tensor, b: Any, to: float = 1e-10) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=to, atol=to)


X, Y = (
    torch.randn(6, 3, generator=torch.Generator().manual_seed(0)),
    torch.randn(6, generator=torch.Generator().manual_seed(1)),
)
F32: dict[str, Any] = {"dtype": torch.float32}
