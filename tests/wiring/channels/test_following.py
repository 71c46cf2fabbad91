"""Channels followed through the graph of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from excite.wiring import trace
from excite.wiring.channels import follow
from excite.wiring.export import exported


def test_uses_of_parameters_come_in_order_of_execution() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    ctx = follow(model, exported(model, torch.zeros(2, 3)))
    assert [use.slot.source.path for use in ctx.uses] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    produced, consumed = ctx.uses[0].out, ctx.uses[2].inp
    assert produced is not None
    assert consumed is not None
    assert [ctx.classes.find(int(a)) for a in produced] == [ctx.classes.find(int(b)) for b in consumed]


def test_an_operator_that_is_not_pytorchs_own_breaks_the_law() -> None:
    with torch.library._scoped_library("excite_test", "FRAGMENT") as library:
        library.define("relu(Tensor x) -> Tensor")
        library.impl("relu", lambda x: x + 1, "CompositeExplicitAutograd")

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.b(torch.ops.excite_test.relu(self.a(x)))

        (group,) = trace(Model(), torch.zeros(2, 3)).groups
        assert (group.law, group.why) == ("none", "relu between a and b has no column 'channels' in the operator table")
