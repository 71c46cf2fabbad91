"""Products with rows of zeros added, against those without."""

import pytest
import torch
from torch import nn

from excite._core.intercept.padded_rows import PaddedRows


@pytest.mark.parametrize("bias", [True, False])
def test_added_rows_change_no_output(bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 11, bias=bias).double(), torch.randn(2, 3, 5).double()
    with torch.no_grad():
        expected = layer(x)
        with PaddedRows(rows=9, device="cpu"):
            found = layer(x)
    assert found.is_contiguous()
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)
    with PaddedRows(rows=9, device="cpu"):
        assert torch.equal(layer(x), expected)  # gradients are wanted: as it is
