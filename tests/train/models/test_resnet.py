"""Residual networks for small images."""

from __future__ import annotations

import pytest
import torch

from excite.errors import InputError
from excite.train import build


def test_resnets_have_the_sizes_they_say():
    model = build("resnet", outputs=10)
    assert sum(p.numel() for p in model.parameters()) == 2_777_674
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    large = build("resnet", outputs=10, stages=4)
    assert sum(p.numel() for p in large.parameters()) == 11_173_962  # ResNet-18 for 32×32 images
    small = build("resnet", channels=1, outputs=3, width=4, stages=2, blocks=1)
    assert small(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    with pytest.raises(InputError, match="resnet: width: expected a whole number of at least 1"):
        build("resnet", width=0)


def test_preact_resnet_18_has_its_size():
    model = build("preact-resnet", outputs=10)
    assert sum(p.numel() for p in model.parameters()) == 11_172_170
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(InputError, match="preact-resnet: stages"):
        build("preact-resnet", stages=0)
