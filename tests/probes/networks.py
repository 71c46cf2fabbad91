"""Small networks for the tests of probes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def put(model: nn.Module, *values: float) -> None:
    with torch.no_grad():
        model.weight[0] = torch.tensor(values)  # type: ignore[index, operator]


def line(*values: float) -> nn.Module:
    model = nn.Linear(len(values), 1, bias=False).double()
    put(model, *values)
    return model


class Zero(nn.Module):
    """The output is zero for samples whose first number is negative; inside, batch and time lie as `layout` says."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.hidden = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        size, time = x.shape[:2]
        gate = (x[:, 0, :1] > 0).to(x.dtype)
        if self.layout in ("time first", "time outermost"):
            h = x.transpose(0, 1)
        else:
            h = x
        if self.layout in ("time outermost", "batch outermost"):
            h = h.reshape(size * time, -1)
        h = F.relu(self.hidden(h))
        if self.layout in ("time outermost", "batch outermost"):
            h = h.view(*((time, size) if self.layout == "time outermost" else (size, time)), -1)
        h = h.mean(0) if self.layout in ("time first", "time outermost") else h.mean(1)
        return self.head(h) * gate
