"""Layouts of parameters as (blocks, outputs, inputs, rest)."""

from __future__ import annotations

import torch
from torch import nn

from excite.wiring import trace
from excite.wiring.channels.slots import ParameterView, conv_slot


class LearnedQuery(nn.Module):
    """Pools by attention with one query for all samples."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 8))
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.attention(self.query.expand(len(x), -1, -1), x, x)[0][:, 0])


def test_the_sites_of_an_expanded_parameter_can_be_keys():
    groups = trace(LearnedQuery(), torch.randn(3, 5, 8)).groups
    assert all(hash(site.slot) is not None for group in groups for site in (*group.producers, *group.consumers))


def test_rows_of_a_grouped_convolution() -> None:
    weight = torch.arange(4 * 2 * 3.0).view(4, 2, 3)  # 2 blocks of 2 outputs and 2 inputs, kernel 3
    slot = conv_slot(ParameterView("weight", (4, 2, 3)), (4, 2, 3), groups=2, transposed=False)
    assert (slot.outputs, slot.inputs, slot.blocks) == (4, 4, 2)
    assert torch.equal(slot.out_rows(weight), weight.flatten(1))
    assert torch.equal(slot.in_rows(weight)[3], weight[2:, 1].reshape(-1))  # the second input of the second block


def test_a_transposed_view_keeps_the_entries_of_its_parameter() -> None:
    view = ParameterView("weight", (2, 3)).then(torch.ops.aten.t.default)
    assert view.entries().tolist() == [[0, 3], [1, 4], [2, 5]]
