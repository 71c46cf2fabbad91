"""Random small networks with points, for tests of bounds against exact values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def random_net(seed: int) -> tuple[nn.Module, Tensor, Tensor, dict[str, Any]]:
    """A network of 2 to 16 inputs with two hidden layers, three points, their decisions, and threshold and bounds."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inputs, hidden, outputs = (2, 4, 6, 8, 16)[seed % 5], (6, 10, 12)[seed % 3], (1, 3, 2, 5)[seed % 4]
        bend = (nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh(), nn.ReLU())[seed // 2 % 4]
        model = nn.Sequential(
            nn.Linear(inputs, hidden), bend, nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )
        x = torch.rand(3, inputs) * 2 - 1
    f = model(x).detach()
    threshold = float(f.median()) + 0.05
    y = (f[:, 0] > threshold).long() if outputs == 1 else f.argmax(1)
    return model, x, y, {"threshold": threshold, "bounds": (-1, 1)}
