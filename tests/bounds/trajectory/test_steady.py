"""Steadiness, Corollary 1, motion of the bias, the first layer: over random trainings, and where the printed statements fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.truth_trajectory import SETTINGS, compare, train, watched
from scipy import stats

from excite.bounds import (
    bias_distance,
    steadiness,
    steady_lipschitz,
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


def test_the_printed_derivative_is_that_of_hard_labels():
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


def test_counterexample_corollary_1_without_a_gradient():
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
