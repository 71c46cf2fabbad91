"""Products with rows of zeros added, against those without."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite._core.intercept.padded_rows import PaddedWeight, padded, padded_weights


@pytest.mark.parametrize("bias", [True, False])
def test_added_rows_change_no_output(bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 11, bias=bias).double(), torch.randn(2, 3, 5).double()
    own = dict(layer.named_parameters())
    with torch.no_grad():
        expected = layer(x)
        with padded_weights(layer, rows=9, device="cpu"):
            assert isinstance(layer.weight, PaddedWeight)
            found = layer(x)
    assert found.is_contiguous()
    assert type(found) is torch.Tensor
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)
    assert all(own[path] is p for path, p in layer.named_parameters())
    with padded_weights(layer, rows=9, device="cpu"):
        assert torch.equal(layer(x), expected)  # gradients are wanted: as it is


def test_only_products_see_the_added_rows():
    weight = torch.randn(11, 5)
    slow, ids = padded(weight, rows=9, device="cpu"), torch.tensor([0, 10])
    with torch.no_grad():
        for found, expected in ((F.embedding(ids, slow), weight[ids]), (slow.t(), weight.t()), (slow * 2, weight * 2)):
            assert type(found) is torch.Tensor
            assert torch.equal(found, expected)
    assert slow.shape == (11, 5)
    assert slow.dtype == weight.dtype


def test_weights_with_few_or_aligned_rows_stay_as_they_are():
    for rows in (8, 16):
        weight = torch.randn(rows, 3)
        assert padded(weight, rows=9, device="cpu") is weight
    assert not isinstance(padded(torch.randn(11, 3), rows=9), PaddedWeight)  # on a CPU it does not pay
