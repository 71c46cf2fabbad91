"""Lemma 6, as printed and corrected."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.truth_trajectory import first_layer_truth
from hypothesis import given, settings
from hypothesis import strategies as st

from excite.bounds import (
    first_layer_lipschitz,
)
from excite.errors import InputError


def test_counterexample_lemma_6_first_bias():
    """f = 100 (x)₊ at x = 1: ‖ΔW₂‖/‖Δb₁‖ = |f₁(x)|/100, the printed bound 0.01, the first layer's constant 1."""
    derivative, outer = 1.0, 100.0
    w2, b1, b2 = derivative * 1.0, derivative * outer, derivative
    assert w2 / b1 == 0.01
    bound = first_layer_lipschitz([w2], [b2], [0.0], 0.0, 0.0, unit=True, sgd=True)
    assert bound.value == pytest.approx(math.sqrt(2))
    assert bound.terms["gain"] == 1


def test_counterexample_lemma_6_without_the_root_of_two():
    """W₁ = ((1, 0.1), (−1, 0.1)): between its two kinks both units are active and the layer is √2 steep, but no unit vector
    has an output longer than 1.01. With the right bias in place and the circle covered, the paper's value is too small."""
    weight = np.array([[1.0, 0.1], [-1.0, 0.1]])
    angle = 2 * np.pi * np.arange(10000) / 10000
    x = np.stack([np.cos(angle), np.sin(angle)], 1)
    norms = np.linalg.norm(np.maximum(x @ weight.T, 0), axis=1)
    delta = 2 * math.sin(math.pi / 10000 / 2)
    bound = first_layer_lipschitz(norms, np.ones(10000), np.zeros(10000), 0.0, delta, unit=True, sgd=True)
    truth = first_layer_truth(weight, np.zeros(2))
    assert truth == pytest.approx(math.sqrt(2))
    assert bound.terms["gain"] < 1.01 < truth <= bound.value


def test_counterexample_lemma_6_where_the_second_layer_is_dead():
    """W₂ kills the second layer wherever the steep unit of the first one is active: those points never move b₂ and say nothing
    about f₁. Over the others ϑ = 1, the bound is about √2, and ‖W₁‖₂ is about 10."""
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1)
    ).double()
    with torch.no_grad():
        for p, value in zip(
            model.parameters(), ([[10.0, 1.0], [-1.0, 0.1]], [0, 0], [[-1.0, 1.0]], [0.05], [[1.0]], [3.0])
        ):
            p.copy_(torch.tensor(value))
    count = 100
    angle = 2 * math.pi * (torch.arange(count, dtype=torch.float64) + 0.25) / count
    x = torch.stack([angle.cos(), angle.sin()], 1)
    weight, bias = [], []
    for point in x:  # one step each, so small that W₁ stays
        slopes = torch.autograd.grad((model(point) - 1.0).square().sum(), [model[2].weight, model[2].bias])
        weight.append(float(torch.linalg.matrix_norm(slopes[0], 2)))
        bias.append(float(slopes[1].norm()))
    dead = [i for i in range(count) if bias[i] == 0]
    assert 20 < len(dead) < 80
    truth = float(torch.linalg.matrix_norm(model[0].weight.detach(), 2))
    delta = 2 * math.sin(math.pi / count / 2)
    dropped = [(w, b) for w, b in zip(weight, bias) if b > 0]
    printed = first_layer_lipschitz(*np.array(dropped).T, np.zeros(len(dropped)), 0.0, delta, unit=True, sgd=True)
    assert printed.value < 1.5 < 10 < truth  # each step that is left has moved b₂, but not each point
    order = {"unit": True, "sgd": True, "drawn": range(count), "points": count}
    bound = first_layer_lipschitz(weight, bias, np.zeros(count), 0.0, delta, **order)
    assert bound.value is None
    assert bound.terms["unmoved"] == tuple(dead)
    assert [a.held for a in bound.assumptions] == [True, True, True, False]
    assert f"{len(dead)} of {count} never do" in bound.failed[0].detail
    # Without the points it cannot be checked, so it is not taken for granted.
    assert first_layer_lipschitz(weight, bias, np.zeros(count), 0.0, delta, unit=True, sgd=True).value is None
    # The points that do move b₂ cover less: from the middle of the dead arc the nearest of them is more than 1 away.
    alive = [i for i in range(count) if bias[i] > 0]
    wide = float(torch.cdist(x, x[alive]).amin(1).max()) + delta
    alone = [np.array(part)[alive] for part in (weight, bias, [0.0] * count)]
    rest = first_layer_lipschitz(*alone, 0.0, wide, **(order | {"drawn": range(len(alive)), "points": len(alive)}))
    assert [a.text for a in rest.failed] == ["training points cover the unit sphere with δ < 1"]
    for wrong in ({"points": None}, {"points": 50}, {"drawn": range(3)}, {"drawn": [0.5] * count}):
        with pytest.raises(InputError):
            first_layer_lipschitz(weight, bias, np.zeros(count), 0.0, delta, **(order | wrong))


def test_lemma_6_holds_where_every_point_moves_the_second_bias():
    """Two steps a point, the second without an update: the first one says what is needed."""
    points, weight = 12, np.array([[1.0, 0.5], [-0.3, 2.0]])
    angle = 2 * np.pi * np.arange(points) / points
    x = np.stack([np.cos(angle), np.sin(angle)], 1)
    outputs = np.linalg.norm(np.maximum(x @ weight.T, 0), axis=1)
    drawn = np.r_[np.arange(points), np.arange(points)]
    moved, zeros = np.r_[np.ones(points), np.zeros(points)], np.zeros(2 * points)
    delta = 2 * math.sin(math.pi / points / 2)
    bound = first_layer_lipschitz(np.r_[outputs, 0 * outputs], moved, zeros, 0.0, delta, unit=True, sgd=True,
                                  drawn=torch.from_numpy(drawn), points=points)  # fmt: skip
    assert bound.holds
    assert np.linalg.norm(weight, 2) <= bound.value
    assert bound.terms["unmoved"] == ()


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_lemma_6_corrected_on_random_layers(seed, width):
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(width, 2)), rng.normal(size=width) * rng.choice([0, 0.3, 3])
    points = int(rng.integers(7, 40))
    angle = 2 * np.pi * np.arange(points) / points
    x = np.stack([np.cos(angle), np.sin(angle)], 1)
    outputs = np.linalg.norm(np.maximum(x @ weight.T + bias, 0), axis=1)
    later = weight + 0.1 * rng.normal(size=weight.shape)
    beta = float(np.linalg.norm(later - weight, 2))
    delta = 2 * math.sin(math.pi / points / 2)
    bound = first_layer_lipschitz(outputs, np.ones(points), np.full(points, np.linalg.norm(bias)), beta, delta)
    assert np.linalg.norm(later, 2) <= bound.value * (1 + 1e-12)
