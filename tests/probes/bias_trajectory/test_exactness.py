"""Models that treat their input as a leaf of their own, as Wav2Vec2 does in training mode."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from excite import PersistentExcitation
from excite.probes.bias_trajectory.exactness import labels
from excite.probes.bias_trajectory.sites import find


class Speech(nn.Module):
    """Asks for the gradient of its input, and masks time steps that numpy draws; one layer is weight-normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 4)
        self.mask = nn.Parameter(torch.randn(4))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3, padding=1))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None]
        if self.training:
            x.requires_grad = True
        h = torch.tanh(self.enter(x))
        if self.training:
            masked = np.random.default_rng(0).random(tuple(h.shape[:2])) < 0.3
            h = h.clone()
            h[torch.from_numpy(masked)] = self.mask
        return self.head(torch.tanh(self.conv(h.mT)).mean(-1))


def test_a_model_that_takes_its_input_gradient_is_watched(tmp_path) -> None:
    torch.manual_seed(0)
    model, x, y = Speech().train(), torch.randn(4, 6), torch.tensor([0, 1, 0, 1])
    assert "vector" in labels(model, x, find(model, x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with excite.watch(model, x, tmp_path / "run", optimizer, strict=True) as watch:
        for _ in range(2):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    PersistentExcitation(model, 0.1, classes=2).loss(x, y).backward()
