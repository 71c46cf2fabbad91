"""Norms of convolutions against their matrices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from excite.lipschitz import bound
from excite.wiring.propagation.operator_norms import convolution_norm, spectral_bound
from models import build


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_spectrum_bounds_a_convolution_from_above(stride: int, groups: int, dilation: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4 // groups, 3, 2, dtype=torch.float64, generator=generator)

    def conv(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, None, stride, 1, dilation, groups)

    exact, is_exact = convolution_norm(conv, weight, (1, 4, 6, 7))
    finer = spectral_bound(weight, (6, 7), (dilation, dilation), groups)
    assert is_exact
    assert finer is not None
    assert exact <= finer * (1 + 1e-12)
    if stride == 1:
        assert finer <= 1.5 * exact


def test_large_convolutions_are_bounded_without_their_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("convolutional")
    exact = bound(model, x, "2").value
    monkeypatch.setattr("excite.wiring.propagation.operator_norms._LARGEST", 0)
    by_spectrum = bound(model, x, "2")
    monkeypatch.setattr("excite.wiring.propagation.operator_norms._MAX_PRODUCTS", 0)
    by_sums = bound(model, x, "2")
    assert exact <= by_spectrum.value * (1 + 1e-12)
    assert by_spectrum.value <= by_sums.value
    assert by_spectrum.terms[0][0].endswith("(bound)")
