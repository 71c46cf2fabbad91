"""Laws of squares integrated from the start and the squared updates alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from excite.probes import conservation
from excite.probes.conserved.integrals.squares import Motion, kernels

F64 = torch.float64


def network(norm: bool = False):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), *([nn.LayerNorm(6)] if norm else []), nn.ReLU(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double(), torch.randn(8, 4, dtype=F64)


def train(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x).square().mean() - model(x).mean()).backward()
        optimizer.step()


def test_kernels_are_the_recursion():
    rng = np.random.default_rng(0)
    motions = [Motion(*rng.random(4), fresh=i == 0) for i in range(5)]
    motions[2] = Motion(0.3, 0.2, 0.0, 0.0, False)
    forces, known = rng.standard_normal((2, 5))
    value, velocity = rng.standard_normal(2)
    start, squares, of_known = kernels(motions)
    closed = start @ [value, velocity] + squares @ forces + of_known @ known
    for m, force, e in zip(motions, forces, known):
        if m.momentum:
            product = m.buffer_factor * velocity + m.gain * (m.decay * value + e)
            value, velocity = value - 2 * m.rate * product + m.rate**2 * force, product - m.rate * force
        else:
            c = force + m.decay**2 * value + 2 * m.decay * e  # of g + λ w
            value, velocity = value - 2 * m.rate * (m.decay * value + e) + m.rate**2 * c, 0.0
    np.testing.assert_allclose(closed, [value, velocity], rtol=1e-12)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.05},
        {"momentum": 0.9, "weight_decay": 0.05},
        {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.05},
    ],
)
def test_the_integral_is_the_value_after_100_steps(options, norm):
    model, x = network(norm)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, **options)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 40)
        optimizer.param_groups[0]["lr"] = 0.02
        ledger.read()
        train(model, optimizer, x, 60)
        report = ledger.read()
    assert report.holds
    assert max(entry.integral_error for entry in report.entries) < 1e-12
    assert max(entry.moved for entry in report.entries) > 1e-5


def test_a_buffer_that_is_older_than_the_ledger():
    model, x = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.05)
    train(model, optimizer, x, 5)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 30)
        state = ledger.state_dict()
        entry = ledger.read().entries[0]
    assert entry.integral_error < 1e-12
    with conservation(model, optimizer, x) as resumed:
        resumed.load_state_dict(state)
        train(model, optimizer, x, 30)
        assert resumed.read().entries[0].integral_error < 1e-12


def test_weights_changed_outside_show_in_the_integral():
    model, x = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 3)
        with torch.no_grad():
            model[0].weight.mul_(1.1)
        train(model, optimizer, x, 3)
        assert ledger.read().entries[0].integral_error > 1e-3


@pytest.mark.parametrize("kind", ["adam", "nesterov", "groups", "earlier"])
def test_where_there_is_none(kind):
    model, x = network()
    settings = {"lr": 0.05, "momentum": 0.9, "nesterov": kind == "nesterov"}
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = (
        torch.optim.Adam(model.parameters(), 0.01)
        if kind == "adam"
        else torch.optim.SGD(groups if kind == "groups" else model.parameters(), **settings)
    )
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 3)
        if kind == "earlier":  # a state of a version without integrals
            ledger.load_state_dict({name: value for name, value in ledger.state_dict().items() if name != "integral"})
            train(model, optimizer, x, 3)
        (entry,) = ledger.read().entries
    assert entry.holds
    assert math.isnan(entry.integral_error)


def test_groups_have_integrals_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)
    ).double()
    x = torch.randn(8, 4, dtype=F64)
    groups = [
        {"params": model[:3].parameters(), "momentum": 0.9},
        {"params": model[3:].parameters(), "weight_decay": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, 0.05)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 30)
        assert [entry.integral_error < 1e-12 for entry in ledger.read().entries] == [True, True]
