"""Which sample a row belongs to, wherever the batch axis is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from excite.probes import Rank, richness
from excite.probes.base import StepContext
from models import build
from probes.networks import Zero


@pytest.mark.parametrize("size", [5, 4])  # four samples of four steps: the axes cannot be told by their length
@pytest.mark.parametrize("layout", ["batch first", "time first", "time outermost", "batch outermost"])
def test_points_with_output_zero_do_not_count_on_any_batch_axis(layout: str, size: int) -> None:
    torch.manual_seed(0)
    model = Zero(layout).double()
    x = torch.randn(size, 4, 3, dtype=torch.float64)
    x[:, 0, 0] = torch.tensor([1.0, -1, -1, 1, 1])[:size]
    found = richness(model, x, units=True)["hidden"]
    rows = x[x[:, 0, 0] > 0].reshape(-1, 3)
    with torch.no_grad():
        active = model.hidden(rows) > 0
    assert found.units.points.tolist() == active.sum(0).tolist()
    for unit in range(4):
        expected = np.linalg.matrix_rank(rows[active[:, unit]].numpy())
        assert found.units.rank[unit] == expected
    assert found.units_note == ""
    probe = Rank(units=True).measure(StepContext(model, 0, example=x))  # the probe leaves the same points out
    assert probe["deficient/hidden"] == len(found.units.deficient) / 4
    assert richness(model, -x.abs(), units=True)["hidden"].units.points.tolist() == [0] * 4


def test_the_table_has_layouts_too() -> None:
    """In models whose output layer has no bias and gets nothing, all points are left out, whatever the layout."""
    for name in ("transformer-time-first", "transformer", "residual", "mlp"):
        model, x = build(name, batch=6)
        whole = richness(model, x, units=True)
        assert all(one.units_note == "" for one in whole)
        head = list(model.modules())[-1]
        assert isinstance(head, nn.Linear)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        assert all(one.units.silent == list(range(len(one.units))) for one in richness(model, x, units=True))
