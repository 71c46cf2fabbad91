"""Attention: values against the output, queries against keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.wiring import trace


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).unflatten(-1, (2, 3)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)).sum(1)


def test_each_head_has_two_matrix_laws() -> None:
    groups = trace(Attention(), torch.randn(2, 5, 6)).groups
    found = sorted((g.producers[0].layer, g.consumers[0].layer, g.law, g.channels) for g in groups)
    assert found == [("q", "k", "matrix", 3)] * 2 + [("v", "out", "matrix", 3)] * 2
