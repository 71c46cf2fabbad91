"""Sums over the classes of the last layer, under softmax cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from models import Tokens


def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    (translation,) = excite.trace(model, x).translations
    return model, x, y, translation


def test_sums_are_conserved_by_sgd_with_momentum():
    model, x, y, translation = classifier()
    weights = dict(model.named_parameters())
    start = translation.sums(weights).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        rate = translation.sums({path: p.grad for path, p in weights.items()})
        assert rate.abs().max() < 1e-12 * weights["2.weight"].grad.abs().sum()
        optimizer.step()
    assert (translation.sums(weights) - start).abs().max() < 1e-12
    assert not torch.allclose(weights["2.weight"], model[0].weight.new_zeros(3, 6))


def test_decay_shrinks_them_by_a_factor_per_step():
    model, x, y, translation = classifier()
    weights = dict(model.named_parameters())
    start = translation.sums(weights).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (translation.sums(weights) - start * (1 - 0.1 * 0.05) ** 100).abs().max() < 1e-12


def test_what_has_none():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embed(x))

    tokens = torch.arange(8).view(2, 4)
    assert excite.trace(Tied(), tokens).translations == ()
    assert excite.trace(Tokens(), tokens).translations == ()  # one output
    squashed = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    assert excite.trace(squashed, torch.zeros(2, 4)).translations == ()
    assert excite.trace(nn.Linear(4, 0), torch.zeros(2, 4)).translations == ()
