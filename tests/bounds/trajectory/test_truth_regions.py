"""Theorem 2 and the program over dropout patterns are never violated; `python -m benchmarks.truth_regions` in small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.truth_regions import SETTINGS, dropout, steepest, summary, theorem2, train

from excite.bounds.relu_network import as_module, relu_network
from excite.bounds.trajectory.patterns import patterns, slopes
from excite.lipschitz import local


def check(trainings: int, dropouts: int, steps: int) -> None:
    rows = theorem2(trainings, steps=steps)
    for name, row in rows.items():
        assert row.violated == 0, name
        assert row.bounds > 0, name
    for name, one, truth in dropout(dropouts, steps=max(2000, steps)):
        reached = one.program.reached
        assert one.program.holds
        assert reached.any(), name
        assert (truth[reached] <= one.program.values[reached] * (1 + 1e-9) + 1e-14).all(), name


@pytest.mark.slow
def test_no_bound_is_violated_over_small_trainings() -> None:
    check(len(SETTINGS), 2, 1000)


@pytest.mark.slow
def test_no_bound_is_violated_over_random_trainings() -> None:
    check(60, 48, 4000)
    assert "48 of 48" in summary(dropout(48))  # how often λ_steady is above every local constant found


def test_phi_of_a_training_is_the_derivative_by_the_first_bias() -> None:
    """The distance that b₁ moved, over learning rate and loss derivative, at the last step; later steps change it little."""
    for sigmoid in (False, True):
        one = train((2, 6, 5, 1), sigmoid, 3, steps=500)
        network = relu_network(one.pairs, one.x)
        phi, steep = slopes(network, patterns(network, one.x))
        if sigmoid:
            f = network.signals(one.x)[-1][:, 0].sigmoid()
            phi, steep = phi * f * (1 - f), steep * f * (1 - f)
        ratio = (one.phi / phi)[phi > 0]
        assert float(ratio.median()) == pytest.approx(1, abs=0.05)
        model = as_module(one.pairs, sigmoid=sigmoid)
        torch.testing.assert_close(local(model, one.x), steep)
        assert (local(model, one.x) <= steepest(one.pairs, one.x, sigmoid) * (1 + 1e-12)).all()


def test_training_learns() -> None:
    one = train((2, 12, 1), False, 0)
    network = relu_network(one.pairs, one.x)
    assert float((network.signals(one.x)[-1][:, 0] - one.y).square().mean()) < 0.5 * float(np.var(one.y.numpy()))
