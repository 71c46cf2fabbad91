"""Assumption 1 monitored: patterns and slopes against a network written out."""

from __future__ import annotations

import math

import pytest
import torch

import excite
from excite.errors import InputError, ModelError
from excite.probes import Consistency, Every, consistency
from excite.probes.base import StepContext
from excite.probes.bias_trajectory.consistency import patterns_and_slopes
from models import build, same_state, state_of


def test_patterns_and_slopes_of_a_network_written_out():
    model, x = build("mlp")
    before = state_of(model)
    signs, slopes = patterns_and_slopes(model, x)
    assert same_state(before, state_of(model))
    for i in range(len(x)):
        z1 = model[0](x[i])
        z2 = model[2](z1.relu())
        assert signs[i].tolist() == [*(z1 > 0).tolist(), *(z2 > 0).tolist()]
        jacobian = torch.func.jacrev(model)(x[i])
        assert float(slopes[i]) == pytest.approx(float(jacobian.detach().norm()), rel=1e-12)


def test_gamma_is_the_largest_ratio_of_two_slopes_of_a_point():
    slopes = torch.tensor([[1.0, 2.0, 0.0], [1.5, 1.9, 0.0], [1.2, 2.1, 0.0]])
    patterns = torch.tensor([[1, 7, 3], [1, 7, 3], [1, 8, 3]])
    found = consistency(patterns, slopes)
    assert found.gamma == pytest.approx(0.5)
    assert found.changed == pytest.approx(1 / 3)
    assert not found.holds
    assert found.measurements == 3
    assert consistency(patterns[:2], slopes[:2]).holds
    assert consistency(patterns, torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 1, 1]])).gamma == math.inf
    with pytest.raises(InputError):
        consistency(patterns[0], slopes)


def test_the_probe_while_a_network_trains():
    model, x = build("mlp", batch=30)
    probe = Consistency(Every(5))
    looks = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with excite.watch(model, example=x, probes=[probe], strict=True) as watch:
        for step in range(20):
            if step % 5 == 0:
                looks.append(patterns_and_slopes(model, x))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            watch.step()
        state = probe.state_dict()
    looks.append(patterns_and_slopes(model, x))
    signs, slopes = (torch.stack(column) for column in zip(*looks))
    for start, since in ((0, 0), (2, 10), (4, 20)):
        expected, found = consistency(signs[start:], slopes[start:]), probe.since(since)
        assert found.gamma == pytest.approx(expected.gamma, rel=1e-12)
        assert (found.changed, found.measurements) == (expected.changed, expected.measurements)
    assert probe.since(0).changed > 0
    again = Consistency()
    again.load_state_dict(state)
    assert again.since(10) == probe.since(10)
    with pytest.raises(InputError, match="no measurement"):
        probe.since(21)


def test_bad_input():
    model, _x = build("mlp")
    with pytest.raises(InputError, match="example"):
        Consistency().measure(StepContext(model, 0))
    classes, images = build("convolutional-classes")
    with pytest.raises(ModelError, match="one output"):
        Consistency().measure(StepContext(classes, 0, example=images))
