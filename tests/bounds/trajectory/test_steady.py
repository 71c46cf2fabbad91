"""Steadiness, Corollary 1, motion of the bias, the first layer: over random trainings, and where the printed statements fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.truth_trajectory import SETTINGS, compare, first_layer_truth, train, watched
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from excite.bounds import (
    bias_distance,
    bias_variance,
    first_layer_lipschitz,
    steadiness,
    steady_lipschitz,
    trajectory_length,
)
from excite.errors import InputError
from excite.lipschitz import local
from excite.probes import trajectory

# What fails as printed, by the numbers of the benchmark; everything else must never be violated.
PRINTED = {"printed: Lemma 1, lower half", "printed: Corollary 2, windows of 2", "Lemma 6 without √2"}
# Corollary 1 is about a step drawn at random, with 95 % confidence: the last step is promised nothing, and of the shares
# that are promised one in twenty may be missed.
SHARE = "Corollary 1, share of steps that hold against the share promised"
LAST = "Corollary 1, at the last step"


def check(found):
    for name, row in found.items():
        assert row.given > 0, name
        if name == SHARE:
            assert row.violated <= stats.binom.ppf(0.99, row.given, 0.05), name
        elif name != LAST and not name.startswith("printed") and name not in PRINTED:
            assert row.violated == 0, name


@pytest.fixture(scope="module")
def rows():
    return compare([train(setting, 400, seed) for setting in SETTINGS for seed in range(2)], window=50)


def test_what_holds_is_never_violated(rows):
    check(rows)
    assert rows["Lemma 1, upper half, every step"].given == 400 * 2 * len(SETTINGS)


def test_what_is_printed_is_violated(rows):
    assert rows["printed: Lemma 1, lower half"].violated > 0
    assert rows["printed: Corollary 2, windows of 2"].violated > 0


def test_the_probe_counts_no_violation_in_float64():
    samples, bad = watched(40, 0)
    assert samples == 320
    assert bad == 0


@pytest.mark.slow
def test_more_trainings():
    found = compare([train(setting, 1500, seed) for setting in SETTINGS for seed in range(100, 112)])
    check(found)
    assert found[LAST].violated > 0  # so it is not promised for nothing


# -- printed statements that fail, smallest examples ------------------------------------------------------------------
def test_counterexample_lemma_1_lower_half():
    """f(x) = (x₁)₊ − (x₁)₊ − … with W₁ = (1, 1)', W₂ = (1, −1): the bias moves, the function is 0."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [1.0]]))
        model[0].bias.zero_()
        model[2].weight.copy_(torch.tensor([[1.0, -1.0]]))
    found = trajectory(model, torch.ones(1, 1, dtype=torch.float64))["0"]
    smallest = float(torch.linalg.svdvals(model[0].weight.detach())[-1])  # σ_n(W₁) = √2
    assert float(found.lipschitz) == 0
    assert float(found.values) * smallest == pytest.approx(2)  # printed lower bound
    assert float(found.lower) == 0  # two active rows, one input
    # One step of SGD with α = ε = 1: the bias moves by √2, Corollary 3 as printed allows 0.
    far = bias_distance(1.0, [1.0], found.lipschitz, found.active, updates=found.values)
    assert far.value == math.inf
    assert far.terms["path"] == pytest.approx(math.sqrt(2))


def test_counterexample_remark_on_data_in_a_subspace():
    """The same network on inputs (x, 0): the least ‖W₁x‖ over unit x of that line, √2, is no substitute for σ_n either."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        model[0].bias.zero_()
        model[2].weight.copy_(torch.tensor([[1.0, -1.0]]))
    along = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = trajectory(model, along)["0"]
    assert float(found.lipschitz) == 0
    assert float(found.values * (along @ model[0].weight.detach().T).norm()) == pytest.approx(2)  # printed lower bound
    assert float(found.lower) == pytest.approx(0, abs=1e-12)


def test_the_derivative_of_cross_entropy_as_printed_is_that_of_hard_labels():
    """y = ½, ŷ = ¾: |dℓ/dŷ| = 4/3, printed 1/|1 − y − ŷ| = 4. The ratio uses autograd's, and stays the slope for any label."""
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1), torch.nn.Sigmoid()
    ).double()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.fill_(1.0)
            layer.bias.zero_()
    x = torch.tensor([[math.log(3)]], dtype=torch.float64)  # ŷ = ¾
    for label, right in ((0.0, True), (1.0, True), (0.5, False)):
        y = torch.full((1, 1), label, dtype=torch.float64)
        f = model(x)
        (derivative,) = torch.autograd.grad(torch.nn.functional.binary_cross_entropy(f, y), f)
        printed = 1 / abs(1 - label - float(f.detach()))
        assert (float(derivative.abs()) == pytest.approx(printed)) is right
        found = trajectory(model, x, y, torch.nn.functional.binary_cross_entropy)["0"]
        assert float(found.values) == pytest.approx(3 / 16)  # ŷ(1 − ŷ), the slope of f
    assert float(derivative.abs()) == pytest.approx(4 / 3)


def test_counterexample_corollary_2():
    """T = {0, 1}, b = 0, 0, 5: the iterates of T have variance 0, the printed bound is positive."""
    # One linear unit f = x + b, α = 1: the first step has error 0+, the second 5.
    errors, steep, sigma = np.array([1e-3, 5.0]), np.ones(2), np.ones(2)
    iterates = np.array([0.0, 1e-3, 5.001])
    printed = (steep / sigma).mean() ** 2 * (2 / (1 / errors**2).sum()) / 4
    assert iterates[:2].var() < printed
    bound = bias_variance(1.0, errors, steep, sigma)
    assert 0 < bound.value <= iterates.var()


def test_the_constant_of_corollary_2_cannot_be_better():
    """Iterates along the top eigenvector of the path's Laplacian, errors as large as the steps: equality."""
    for m in (2, 3, 5, 12):
        iterates = np.array([(-1.0) ** k * math.sin(math.pi * (k + 0.5) / m) for k in range(m)])
        steps = np.abs(np.diff(iterates))
        # equality in Cauchy-Schwarz needs ‖Δ‖/ε proportional to 1/ε · ... : α λ/σ = ‖Δ‖/ε with ε = 1/‖Δ‖
        errors = 1 / steps
        bound = bias_variance(1.0, errors, steps**2, 1.0)
        assert bound.value == pytest.approx(iterates.var(), rel=1e-12)


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


def test_lemma_6_holds_where_every_point_has_one_step_that_moves_the_second_bias():
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


def test_counterexample_corollary_1_where_the_loss_has_no_gradient():
    """The hinge loss has no gradient at a point with a margin above 1: it makes no update, however steep f is there."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).double()
    with torch.no_grad():
        for p, value in zip(model.parameters(), ([[1.0], [-1.0]], [0.0, 0.0], [[9.0, 0.1]], [0.0])):
            p.copy_(torch.tensor(value))
    x = torch.tensor([[1.0], [-1.0], [-2.0]], dtype=torch.float64)
    y = torch.ones(3, 1, dtype=torch.float64)
    found = trajectory(model, x, y, lambda f, t: (1 - t * f).clamp(min=0).sum())["0"]
    assert found.zero == 1
    seen = found.values[~found.values.isnan()]
    updates = seen[torch.arange(100) % 2]  # 50 draws of the steep point are missing
    sigma = float(torch.linalg.matrix_norm(model[0].weight.detach(), 2))
    unchecked = steady_lipschitz(updates, sigma, 3)
    assert unchecked.value < 1 < 9 == float(local(model, x).max())
    assert unchecked.assumptions[-1].held is None
    for gamma in (None, 0.0):
        bound = steady_lipschitz(updates, sigma, 3, zero=50, gamma=gamma)
        assert bound.value is None
        assert "50 draws" in bound.failed[0].detail
        assert steady_lipschitz(updates, sigma, 3, zero=0, gamma=gamma).assumptions[-1].held is True
    with pytest.raises(InputError, match="zero"):
        steady_lipschitz(updates, sigma, 3, zero=-1)


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


# -- definitions ------------------------------------------------------------------------------------------------------
def test_steadiness():
    found = steadiness([5.0, 1.0, 3.0, 2.0, 1.0, 2.0])
    assert (found.tau, found.phi) == (3, 2.0)  # the last half has at most 2, and so has everything from step 3 on
    assert found.after(0) == 5
    assert found.after(2) == 3
    assert found.since(3.0) == 1
    assert found.since(0.5) is None
    assert steadiness([1.0, 4.0]).tau == 0
    assert "(3, 2)-steady" in str(found)
    with pytest.raises(InputError):
        steadiness([])
    with pytest.raises(InputError):
        steadiness([1.0, math.nan])
    with pytest.raises(InputError):
        found.after(9)


def test_corollary_1_by_chance_and_by_assumption_1():
    updates = np.r_[np.full(100, 9.0), np.full(2000, 2.0)]
    bound = steady_lipschitz(updates, 1.5, 20, tau=100, product=66.0)
    assert bound.value == pytest.approx(1.5 * 2.2)
    assert bound.terms["share"] == pytest.approx(1 - 20 * math.log(20) / 1000)
    assert bound.terms["tighter"] == pytest.approx(20)
    assert not bound.failed
    assert steady_lipschitz(updates[:150], 1.5, 20, tau=100).value is None  # too few steps
    assert steady_lipschitz(np.r_[updates, 7.0], 1.5, 20, tau=100).value is None  # not steady
    assert steady_lipschitz(updates, 1.5, 20, tau=100, phi=1.9).value is None
    sure = steady_lipschitz(updates, 1.5, 20, tau=100, gamma=0.5)
    assert sure.value == pytest.approx(1.5 * 1.5 * 2)
    assert (
        steady_lipschitz(updates[:110], 1.5, 20, tau=100, gamma=0.5).value is None
    )  # not all points can have been seen
    for wrong in ({"tau": -1}, {"points": 0}, {"confidence": 1.0}):
        with pytest.raises(InputError):
            steady_lipschitz(updates, 1.5, **{"points": 20, **wrong})


def test_the_promise_of_corollary_1_is_kept_in_frozen_networks():
    """Slopes 1 at nineteen points and 3 at one: steady with φ = 1.1 only by luck, and then not believed for long."""
    kept = 0
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        updates = np.where(rng.integers(20, size=130) == 0, 3.0, 1.0)
        bound = steady_lipschitz(updates, 1.0, 20, phi=1.1)
        kept += bound.value is not None
    assert kept / 2000 <= 0.05


def test_length_and_distance():
    below, above = trajectory_length([1.0, 2.0], 2.0, [0.5, 1.0])
    assert (below.value, above.value) == (1.5, 4.0)
    assert trajectory_length([1.0, 2.0], 2.0, [0.5, 0.0])[1].value == math.inf
    assert trajectory_length([1.0, 0.0], 2.0, [0.5, 0.0], [2.0, 0.0])[1].value == 2
    far = bias_distance(0.1, [1.0, 2.0], [1.0, 2.0], [0.5, 1.0], updates=[1.0, 1.5], sgd=True)
    assert far.value == pytest.approx(0.1 * (2 + 4))
    assert far.terms["path"] == pytest.approx(0.1 * (1 + 3))
    assert far.holds
    assert bias_distance(0.1, [0.0, 2.0], [1.0, 2.0], [0.0, 1.0]).value == pytest.approx(0.4)
    assert bias_variance(0.1, [0.0, 1.0], [1.0, 1.0], 1.0).value == 0
    assert bias_variance(0.1, [1.0], [1.0], 1.0, sgd=False).value is None
    for call in (
        lambda: bias_variance(0.1, [1.0], [1.0, 2.0], 1.0),
        lambda: bias_variance(0.1, [1.0], [1.0], 0.0),
        lambda: bias_variance(0.1, [1.0], [1.0], 1.0, form="x"),
        lambda: bias_distance(0.1, [-1.0], [1.0], 1.0),
        lambda: trajectory_length([1.0], 0.0, 0.0),
        lambda: first_layer_lipschitz([1.0], [1.0], [1.0], -1.0, 0.1),
    ):
        with pytest.raises(InputError):
            call()
