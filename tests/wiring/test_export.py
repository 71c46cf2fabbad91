"""Models that torch.export cannot follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.wiring import trace
from models import same_state, state_of


class Branching(nn.Module):
    """Torch.export cannot follow it: the branch depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() if bool(h.sum() > 0) else h)


def test_where_export_fails_layers_remain_and_groups_say_why(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = Branching(), torch.randn(3, 5)
    before = state_of(model)
    wiring = trace(model, x)
    assert same_state(before, state_of(model))
    assert [layer.name for layer in wiring.layers] == ["a", "b"]
    assert [(group.law, group.channels) for group in wiring.groups] == [("none", 4), ("none", 2)]
    assert all(group.why.startswith("torch.export failed: ") and "\n" not in group.why for group in wiring.groups)
    assert capfd.readouterr() == ("", "")


class Routed(nn.Module):
    """A mixture of experts: how many samples an expert gets depends on the data."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x):
        chosen = self.gate(x).argmax(1)
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            rows = torch.where(chosen == k)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_shapes_that_depend_on_the_data_are_a_reason():
    wiring = trace(Routed(), torch.randn(6, 4))
    assert {layer.name for layer in wiring.layers} == {"gate", "experts.0", "experts.1"}
    assert all(group.law == "none" and "depends on the values in the batch" in group.why for group in wiring.groups)
