"""Norms of Adam's moments, entry by entry."""

import pytest
import torch
from torch import nn

import excite
from excite.probes import AdamMoments, Every
from excite.probes.base import StepContext


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_moments_are_those_of_a_slow_version(kind):
    model = network()
    for p in model[0].parameters():
        p.requires_grad_(False)  # frozen: has no moments
    optimizer = kind(model.parameters(), lr=0.01)
    probe = AdamMoments(Every(1))
    probe.attach(StepContext(model, 0, optimizer=optimizer))
    assert probe.measure(StepContext(model, 0, optimizer=optimizer)) == {}
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3).double()).square().mean().backward()
        optimizer.step()
    m, v = 0.0, 0.0
    for p in model[2].parameters():
        m += sum(one**2 for one in optimizer.state[p]["exp_avg"].flatten().tolist())
        v += sum(optimizer.state[p]["exp_avg_sq"].flatten().tolist())
    expected = {"m": m**0.5, "m/2": m**0.5, "v": v**0.5, "v/2": v**0.5}
    found = probe.measure(StepContext(model, 3, optimizer=optimizer))
    assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-10)


def test_other_optimizers_are_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(excite.InputError, match="such as AdamW; got SGD"):
        AdamMoments().attach(StepContext(model, 0, optimizer=optimizer))


def test_an_optimizer_that_keeps_other_moments_is_named():
    model = network()
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.1)
    probe = AdamMoments()
    probe.attach(StepContext(model, 0, optimizer=optimizer))
    model(torch.randn(4, 3).double()).sum().backward()
    optimizer.step()
    with pytest.raises(excite.InputError, match="exp_inf"):
        probe.measure(StepContext(model, 1, optimizer=optimizer))
