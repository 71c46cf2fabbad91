"""No bound for squared error is violated over trainings to convergence; `python -m benchmarks.truth_squared` in small."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.truth_squared import SETTINGS, Training, collect, compare, lipschitz, margin, patterns, pieces

from bounds.networks import evaluate, random_network, random_points, regions
from excite.bounds import Descent


def check(trainings):
    rows = compare(trainings)
    for name, row in rows.items():
        assert row.violated == 0, name
    return rows


@pytest.mark.slow
def test_no_bound_is_violated_over_small_trainings():
    trainings, _ = collect(10, 2000, 0, (SETTINGS[0], SETTINGS[2], SETTINGS[12]), together=16)
    rows = check(trainings)
    assert rows["two layers, Lipschitz constant, unit"].given >= 3
    assert rows["norm of a weight matrix, unit"].given >= 6


@pytest.mark.slow
def test_no_bound_is_violated_over_200_trainings():
    trainings, _ = collect(200, 20000, 0)
    rows = check(trainings)
    assert len(trainings) >= 200
    for name in ("two layers, Lipschitz constant, unit", "two layers, margin, unit", "deep, Lipschitz constant, unit"):
        assert rows[name].given > 0


def training(seed, widths=(2, 4, 1), bias=True):
    pairs, x = random_network(widths, bias, seed), random_points(15, widths[0], seed)
    return Training(SETTINGS[0], pairs, x, evaluate(pairs, x), Descent(0.1))


@pytest.mark.parametrize("seed", range(10))
def test_the_measured_truth_lists_all_regions(seed):
    one = training(seed, bias=seed % 3 > 0)
    V, b = one.pairs[0][0].numpy(), one.pairs[0][1]
    b = np.zeros(len(V)) if b is None else b.numpy()
    assert {tuple(p) for p in pieces(one)[0].tolist()} == regions(V, b)
    # No slope between two points is steeper, and some are almost as steep.
    points = random_points(4000, 2, 1) * torch.logspace(-1, 3, 4000, dtype=torch.float64)[:, None]
    near = points + 1e-5 * random_points(4000, 2, 2)
    steep = ((evaluate(one.pairs, near) - evaluate(one.pairs, points)).norm(dim=1) / (near - points).norm(dim=1)).max()
    assert float(steep) <= lipschitz(one) * (1 + 1e-6)


def test_patterns_in_three_dimensions():
    """r planes in general position cut space into 1 + r + C(r, 2) + C(r, 3) regions."""
    rng = np.random.default_rng(0)
    for r in (4, 6):
        found = patterns(rng.standard_normal((r, 3)), rng.standard_normal(r))
        assert len(found) == 1 + r + math.comb(r, 2) + math.comb(r, 3)


@pytest.mark.parametrize("seed", range(6))
def test_the_measured_margin_is_the_nearest_boundary_point(seed):
    one = training(seed)
    output = evaluate(one.pairs, one.x).flatten()
    threshold = float(output.median()) + 0.05
    found = margin(one, threshold)
    # No direction leads out sooner, and some direction leads out soon after.
    angles = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    for factor, crosses in ((0.999, False), (1.001, True)):
        moved = one.x[:, None] + factor * found * circle
        flips = (evaluate(one.pairs, moved).squeeze(2) > threshold) != (output > threshold)[:, None]
        assert bool(flips.any()) == crosses
