"""Rates of change of two-layer ReLU networks."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


def rates(w1: Tensor, w2: Tensor) -> Tensor:
    """d/dt (W₁W₁' − W₂'W₂) under gradient flow, from the gradients."""
    with torch.no_grad():
        made = w1.grad @ w1.T  # type: ignore[union-attr, operator]
        read = w2.T @ w2.grad  # type: ignore[union-attr, operator]
        return -(made + made.T) + (read + read.T)
