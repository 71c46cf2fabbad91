"""Theorem 6 against convex solvers for both problems, and where it fails."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.optimize import minimize

from excite import ExciteError
from excite.bounds import penalty_of_radius, radius_of_penalty
from excite.bounds.excitation.penalized import duality_gap, penalized
from excite.bounds.excitation.regularization import excited_loss

NORMS = {"1": 1, "2": 2, "inf": np.inf}


def problem(seed: int, count: int = 8, n: int = 4):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, n))
    return x, x @ rng.normal(size=n) + 0.5 * rng.normal(size=count)


def objective(x, y, w, penalty, norm, power):
    return ((y - x @ w) ** 2).sum() + penalty * np.linalg.norm(w, NORMS[norm]) ** power


def by_solver(x, y, penalty, norm, power):
    """BFGS where the norm is smooth; else SLSQP on min ‖y − Xw‖² + λ t^m with linear constraints that keep ‖w‖ ≤ t."""
    n = x.shape[1]
    start = np.linalg.lstsq(x, y, rcond=None)[0]
    if norm == "2":

        def gradient(w):
            return -2 * x.T @ (y - x @ w) + penalty * power * np.linalg.norm(w) ** (power - 2) * w

        return minimize(
            lambda w: objective(x, y, w, penalty, norm, power), start, jac=gradient, options={"gtol": 1e-9}
        ).x

    def value(z):
        return ((y - x @ z[:n]) ** 2).sum() + penalty * max(z[n], 0.0) ** power

    def slope(z):
        rest = np.zeros(len(z) - n - 1)
        return np.r_[-2 * x.T @ (y - x @ z[:n]), penalty * power * max(z[n], 0.0) ** (power - 1), rest]

    one, zero = np.eye(n), np.zeros((n, 1))
    if norm == "inf":  # |w_i| ≤ t
        sides, extra = np.block([[one, zero + 1], [-one, zero + 1]]), 0
    else:  # |w_i| ≤ a_i, Σa ≤ t
        sides = np.block([[one, zero, one], [-one, zero, one], [zero.T, np.ones((1, 1)), zero.T - 1]])
        extra = n
    within = {"type": "ineq", "fun": lambda z: sides @ z, "jac": lambda z: sides}
    found = []
    for shrink in (1.0, 0.5, 0.1):
        w = shrink * start
        z = np.r_[w, np.linalg.norm(w, NORMS[norm]) * 1.1, np.abs(w)[:extra]]
        done = minimize(
            value, z, jac=slope, constraints=[within], method="SLSQP", options={"maxiter": 2000, "ftol": 1e-16}
        )
        found.append(done.x[:n])
    return min(found, key=lambda w: objective(x, y, w, penalty, norm, power))


@pytest.mark.parametrize(("norm", "power"), list(product(NORMS, [1.0, 1.5, 2.0, 3.0])))
def test_both_sides_of_theorem_6_against_a_convex_solver(norm, power):
    for seed, penalty in ((0, 0.3), (1, 2.0)):
        x, y = problem(seed)
        same = radius_of_penalty(x, y, penalty, norm, power)
        assert same.holds
        for ours, (c, m) in ((same.regularized, (penalty, power)), (same.excited, (len(x) * same.radius**2, 2.0))):
            theirs = by_solver(x, y, c, norm, m)
            assert objective(x, y, ours, c, norm, m) <= objective(x, y, theirs, c, norm, m) + 1e-13 * (y @ y)
            assert x @ ours == pytest.approx(x @ theirs, abs=1e-6 * np.linalg.norm(y))
            length = np.linalg.norm(theirs, NORMS[norm])
            assert np.linalg.norm(ours, NORMS[norm]) == pytest.approx(length, rel=1e-6, abs=1e-6)
        assert np.linalg.norm(x @ (same.regularized - same.excited)) < 1e-8 * np.linalg.norm(y)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_there_and_back_over_shapes_and_scales(norm):
    rng = np.random.default_rng(5)
    for k in range(40):
        x, y = problem(k, count=int(rng.integers(1, 12)), n=int(rng.integers(1, 8)))
        if k % 4 == 0:
            x = np.column_stack([x, x[:, 0]])  # solutions are not unique
        power, penalty = float(rng.choice([1.0, 1.3, 2.0, 4.0])), 10 ** rng.uniform(-3, 2)
        there = radius_of_penalty(x, y, penalty, norm, power)
        if there.radius is None:
            assert power == 1
            continue
        back = penalty_of_radius(x, y, there.radius, norm, power)
        assert there.holds
        assert back.holds
        assert back.penalty == pytest.approx(penalty, rel=1e-7)


def test_lambda_is_n_epsilon_squared_for_m_2():
    x, y = problem(2)
    assert penalty_of_radius(x, y, 0.3, 2, 2).penalty == pytest.approx(len(x) * 0.09, rel=1e-12)
    ridge = np.linalg.solve(x.T @ x + len(x) * 0.09 * np.eye(x.shape[1]), x.T @ y)
    assert penalty_of_radius(x, y, 0.3, 2, 2).excited == pytest.approx(ridge, abs=1e-10)


@pytest.mark.parametrize("norm", NORMS)
def test_excited_loss_against_the_vertices_of_the_ball(norm):
    x, y = problem(3, n=3)
    w, radius = np.array([0.7, -1.2, 0.1]), 0.4
    if norm == "1":  # perturbations in the ∞-norm: the corners of a cube
        d = radius * np.array(list(product([-1, 1], repeat=3)))
    elif norm == "inf":
        d = radius * np.vstack([np.eye(3), -np.eye(3)])
    else:
        d = np.random.default_rng(0).normal(size=(200_000, 3))
        d = radius * np.vstack(
            [d / np.linalg.norm(d, axis=1)[:, None], [w / np.linalg.norm(w)], [-w / np.linalg.norm(w)]]
        )
    outputs = (x[:, None] + d) @ w
    value = (0.5 * (y - outputs.min(1)) ** 2 + 0.5 * (y - outputs.max(1)) ** 2).sum()
    assert excited_loss(x, y, w, radius, norm) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_theorem_6_fails_for_m_1_and_large_lambda(norm):
    """x = 1, y = 1, λ ≥ 2: (1 − w)² + λ|w| is least at 0, while w = 1/(1 + ε²) for every ε."""
    assert radius_of_penalty([[1.0]], [1.0], 2.0, norm, 1).radius is None
    same = radius_of_penalty([[1.0]], [1.0], 2.0, norm, 1)
    assert not same.holds
    assert same.regularized.tolist() == [0.0]
    below = radius_of_penalty([[1.0]], [1.0], 1.0, norm, 1)  # w = 1 − λ/2
    assert below.regularized[0] == pytest.approx(0.5)
    assert below.radius == pytest.approx(1.0)


def test_orthogonal_targets_give_zero_for_every_lambda():
    same = radius_of_penalty([[1.0], [1.0]], [1.0, -1.0], 3.0, 2, 3)
    assert same.holds
    assert same.regularized.tolist() == same.excited.tolist() == [0.0]


def test_the_duality_gap_sees_a_wrong_solution():
    x, y = problem(4)
    for norm in NORMS:
        for power in (1.0, 1.5, 2.0):
            w = penalized(x, y, 0.7, norm, power)
            assert duality_gap(x, y, w, 0.7, norm, power) < 1e-12
            assert duality_gap(x, y, w + 1e-3, 0.7, norm, power) > 1e-9


@pytest.mark.parametrize(
    "call",
    [
        lambda: radius_of_penalty([[1.0]], [1.0, 2.0], 1.0),
        lambda: radius_of_penalty([[np.nan]], [1.0], 1.0),
        lambda: radius_of_penalty([[1.0]], [1.0], 0.0),
        lambda: radius_of_penalty([[1.0]], [1.0], 1.0, 2, 0.5),
        lambda: radius_of_penalty([[1.0]], [1.0], 1.0, 3),
        lambda: penalty_of_radius([[1.0]], [1.0], -1.0),
        lambda: penalty_of_radius([[1.0]], [[1.0]], 1.0),
    ],
)
def test_bad_problems(call):
    with pytest.raises(ExciteError):
        call()
