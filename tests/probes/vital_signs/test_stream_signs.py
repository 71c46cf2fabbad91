"""Size, largest entry and kurtosis, entry by entry."""

import pytest
import torch

from excite.probes.vital_signs.stream_signs import stream_signs
from transformer_zoo import slow_stream_signs


@pytest.mark.parametrize("padded", [False, True])
def test_padding_does_not_count(padded):
    torch.manual_seed(0)
    x, tokens = 3 + torch.randn(2, 5, 3).double(), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    found = stream_signs(x, tokens if padded else None)
    expected = slow_stream_signs(x[tokens.bool()] if padded else x)
    assert {key: float(getattr(found, key)) for key in expected} == pytest.approx(expected, rel=1e-10)


def test_bfloat16_is_measured_in_float32():
    x = torch.randn(2, 5, 64).to(torch.bfloat16)
    found, expected = stream_signs(x), slow_stream_signs(x)
    assert {key: float(getattr(found, key)) for key in expected} == pytest.approx(expected, rel=1e-5)
