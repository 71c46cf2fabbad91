"""Maps of linear regions against activation patterns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.errors import InputError, ModelError
from excite.lipschitz import local, region_map
from lipschitz.helpers import mlp


def test_a_slice_numbers_regions_as_patterns_do() -> None:
    model = mlp(5, 8, 7, 1)
    origin, right, up = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = region_map(model, origin, right, up, across=(-3, 3), upward=(-2, 2), size=(30, 40))
    assert found.ids.shape == found.slopes.shape == (30, 40)
    flat = found.points.reshape(-1, 5)
    torch.testing.assert_close(flat[45], origin + found.across[5] * right + found.up[1] * up)
    first = model[1](model[0](flat))
    bits = torch.cat([first > 0, model[3](model[2](first)) > 0], 1)
    _, ids = bits.unique(dim=0, return_inverse=True)
    same = ids[:, None] == ids[None]
    assert torch.equal(same, found.ids.view(-1, 1) == found.ids.view(1, -1))
    assert found.count == len(ids.unique()) > 10
    assert found.ids[0, 0] == 0
    torch.testing.assert_close(found.slopes.view(-1), local(model, flat))
    torch.testing.assert_close(found.outputs.view(-1, 1), model(flat).detach())
    border = found.borders()
    assert bool(border[3, 7]) == bool(found.ids[3, 7] != found.ids[3, 8] or found.ids[3, 7] != found.ids[4, 7])
    with pytest.raises(ModelError, match="tanh"):
        region_map(nn.Sequential(model, nn.Tanh()), origin, right, up)
    with pytest.raises(InputError, match="same shape"):
        region_map(model, origin, right, up[:4])
    with pytest.raises(InputError, match="low < high"):
        region_map(model, origin, right, up, across=(1, 1))
