"""Theorems 4 and 5: second singular values, on random weights and on trainings."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds.trainings import train_deep_linear
from excite import ExciteError
from excite.bounds import alignment, cross_entropy_rank, decay_rank

RNG = np.random.default_rng(1)
COUNT = 12
X = torch.from_numpy(RNG.normal(size=(COUNT, 8, 4)))
Y = (X @ torch.from_numpy(RNG.normal(size=(4, 1))))[..., 0] > 0
WIDTHS = ([5], [6, 4], [5, 5, 5])
EPS = 1e-12


def chain(rng, widths, n=4):
    sizes = [n, *widths, 1]
    return [rng.normal(size=(b, a)) * 10 ** rng.uniform(-1, 1) for a, b in pairwise(sizes)]


def second(w):
    """The second singular value from the eigenvalues of the Gram matrix."""
    values = np.sqrt(np.maximum(np.sort(np.linalg.eigvalsh(w @ w.T))[::-1], 0))
    return values[1] if len(values) > 1 else 0.0


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_bounds_behind_both_theorems_hold_at_any_weights(seed):
    rng = np.random.default_rng(seed)
    weights = chain(rng, WIDTHS[seed % 3])
    x = rng.normal(size=(6, 4))
    y = (x @ rng.normal(size=4) > 0).astype(int)
    decay = 10 ** rng.uniform(-3, 1)
    four, five = decay_rank(weights, decay, x, y), cross_entropy_rank(weights, x, y)
    for k, w in enumerate(weights):
        assert second(w) <= four.terms["value by layer"][k] * (1 + 1e-9) + EPS
        if "value by layer" in five.terms:
            assert second(w) / np.linalg.norm(w, 2) <= five.terms["value by layer"][k] * (1 + 1e-9) + 1e-7


@pytest.mark.parametrize("widths", WIDTHS)
def test_theorem_4_where_weight_decay_has_converged(widths):
    _, weights = train_deep_linear(X, Y.double(), widths, 3000, 0.02, 0, decay=0.3)
    for k in range(COUNT):
        mine = [w[k] for w in weights]
        bound = decay_rank(mine, 0.3, X[k], Y[k])
        assert bound.holds
        assert bound.value < 1e-6
        for w in mine:
            values = np.linalg.eigvalsh((w @ w.T).numpy())
            assert len(values) == 1 or values[-2] <= bound.value**2 + 1e-14 * values[-1]
        assert max(bound.terms["rank"]) <= 1
        if min(bound.terms["rank"]) == 1:
            assert alignment(mine) == pytest.approx(1)


def test_theorem_4_gives_rank_zero_under_strong_decay():
    """x = 1: w₂w₁ with μ = 10 has its only stationary point at zero. The theorem says rank one."""
    _, weights = train_deep_linear(X, Y.double(), [5], 800, 0.02, 0, decay=10.0)
    bound = decay_rank([w[0] for w in weights], 10.0, X[0], Y[0])
    assert bound.holds
    assert bound.terms["rank"] == [0, 0]
    # The smallest case, exactly at the stationary point.
    assert decay_rank([[[0.0]], [[0.0]]], 1.0, [[1.0]], [1]).terms["rank"] == [0, 0]


def test_theorem_4_before_convergence_has_no_value():
    bound = decay_rank(chain(RNG, [5]), 0.1, X[0], Y[0])
    assert bound.value is None
    assert "stationary" in bound.failed[0].text
    assert bound.terms["gradient norm"] > 0


def test_the_gradient_of_theorem_4_against_finite_differences():
    weights, x, y = chain(RNG, [3]), X[0].numpy(), Y[0].numpy().astype(float)

    def value(ws):
        z = x @ (ws[1] @ ws[0]).T
        return 0.5 * ((z[:, 0] - y) ** 2).sum() + 0.2 * sum((w**2).sum() for w in ws)

    def squared(z, target):
        return 0.5 * ((z - target) ** 2).sum()

    total = 0.0
    for k, w in enumerate(weights):
        for at in np.ndindex(w.shape):
            step = np.zeros(w.shape)
            step[at] = 1e-5
            up, down = ([*weights[:k], w + sign * step, *weights[k + 1 :]] for sign in (1, -1))
            total += ((value(up) - value(down)) / 2e-5) ** 2
    bound = decay_rank(weights, 0.2, x, y, squared)
    assert bound.terms["gradient norm"] == pytest.approx(np.sqrt(total), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS)
def test_theorem_5_while_weights_grow(widths):
    # Deeper networks start larger: near zero is a saddle that takes long to leave.
    scale, steps = {1: (0.1, 1500), 2: (0.15, 1500), 3: (0.3, 3000)}[len(widths)]
    first, weights = train_deep_linear(X, Y.double(), widths, steps, 1.0, 0, scale=scale)
    for k in range(COUNT):
        mine, start = [w[k] for w in weights], [w[k] for w in first]
        bound = cross_entropy_rank(mine, X[k], Y[k], start, tolerance=0.4)
        assert bound.holds
        measured = max(second(w.numpy()) / np.linalg.norm(w.numpy(), 2) for w in mine)
        assert measured <= bound.value * (1 + 1e-9)
        assert measured <= bound.terms["promised, with drift"] * (1 + 1e-9)
        assert bound.terms["rank"] == [1] * len(mine)
        assert bound.terms["alignment"].min() > 0.95
        before = max(second(w.numpy()) / np.linalg.norm(w.numpy(), 2) for w in start)
        assert measured < before / 2


def test_theorem_5_from_the_initial_weights_under_small_steps():
    """Small steps follow gradient flow: the differences stay, and the bound is known before training."""
    first, weights = train_deep_linear(X, Y.double(), [5, 4], 2000, 0.05, 3, scale=0.7)
    for k in range(COUNT):
        bound = cross_entropy_rank([w[k] for w in weights], X[k], Y[k], [w[k] for w in first])
        assert bound.terms["drift"] < 0.05 * max(bound.terms["conserved"])
        measured = max(b / a for a, b in zip(bound.terms["first"], bound.terms["second"]))
        assert measured <= bound.terms["promised"] * 1.05


def test_data_that_no_hyperplane_through_the_origin_separates():
    bound = cross_entropy_rank(chain(RNG, [3], n=1), [[1.0], [2.0]], [1, 0])
    assert bound.value is None
    assert "origin" in bound.failed[0].text


def test_vector_outputs_have_no_value():
    weights = [RNG.normal(size=(3, 4)), RNG.normal(size=(2, 3))]
    for bound in (decay_rank(weights, 0.1, X[0], Y[0]), cross_entropy_rank(weights, X[0], Y[0])):
        assert bound.value is None
        assert "scalar" in bound.failed[0].text
        assert bound.terms["rank"] == [3, 2]


def test_no_decay_has_no_value():
    bound = decay_rank(chain(RNG, [3]), [0.0, 0.1], X[0], Y[0])
    assert bound.value is None
    assert "decays" in bound.failed[0].text


@pytest.mark.parametrize(
    "call",
    [
        lambda: decay_rank([], 0.1, X[0], Y[0]),
        lambda: decay_rank([np.ones((3, 4)), np.ones((1, 2))], 0.1, X[0], Y[0]),
        lambda: decay_rank([np.full((1, 4), np.nan)], 0.1, X[0], Y[0]),
        lambda: decay_rank([np.ones((1, 4))], [0.1, 0.1], X[0], Y[0]),
        lambda: decay_rank([np.ones((1, 4))], 0.1, X[0], Y[0][:3]),
        lambda: cross_entropy_rank([np.ones((1, 4))], X[0], Y[0].double() + 1),
        lambda: cross_entropy_rank(chain(RNG, [3]), X[0], Y[0], chain(RNG, [2])),
    ],
)
def test_bad_weights(call):
    with pytest.raises(ExciteError):
        call()
