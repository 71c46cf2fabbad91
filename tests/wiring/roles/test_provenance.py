"""Where the numbers in a graph come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.wiring.channels import follow
from excite.wiring.export import exported
from excite.wiring.roles.provenance import Provenance, follow_origins


def origins(model: nn.Module, *shape: int) -> Provenance:
    graph = exported(model, torch.randn(2, *shape))
    return follow_origins(graph, follow(model, graph))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x).flip(-1))


def test_channels_are_followed_through_functions_and_moves():
    found = origins(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)), 4)
    (first, read, _), (second, last, _) = found.calls
    assert first.layer == "0"
    assert read is not None
    assert not read.labels.any()
    sources = [found.origin_of(label) for label in last.labels.tolist()]
    assert [source[0] is first and source[1] for source in sources] == list(range(6))
    assert last.norms == ("2",)
    assert last.functions == ("tanh",)
    assert second.layer == "3"


def test_product_keeps_both_factors():
    found = origins(Gated(), 4)
    down = {use.layer: read for use, read, _ in found.calls}["down"]
    assert [found.origin_of(label)[0].layer for label in down.labels.tolist()] == ["up"] * 6
    assert [found.origin_of(label)[1] for label in down.labels.tolist()] == list(range(6))[::-1]
    assert down.partner.functions == ("silu",)
    assert found.origin_of(int(down.partner.labels.flatten()[0]))[0].layer == "gate"


def test_unknown_origin():
    assert origins(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), 4).origin_of(0) is None
