"""Lipschitz constants of pooling against the largest change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.lipschitz import bound


@pytest.mark.parametrize(
    "pool", [nn.MaxPool1d(3, 1), nn.MaxPool1d(3, 2, padding=1), nn.MaxPool1d(2, 1, dilation=2), nn.AdaptiveMaxPool1d(4)]
)
def test_overlapping_max_pooling_counts_windows(pool: nn.Module) -> None:
    # One large number stands in as many windows as any can: moving it moves all of them.
    size = 7
    found = bound(pool, torch.zeros(2, 1, size, dtype=torch.float64), "2").value
    spikes = torch.eye(size, dtype=torch.float64)[:, None]
    truth = float((pool(11 * spikes) - pool(10 * spikes)).flatten(1).norm(dim=1).max())
    assert found == pytest.approx(truth, rel=1e-12)
    assert bound(pool, torch.zeros(2, 1, size, dtype=torch.float64), "inf").value == 1
