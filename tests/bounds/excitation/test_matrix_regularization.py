"""Corollary 3: the two problems written out, one output against Theorem 6, and where the corollary fails."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import minimize

from excite import ExciteError
from excite.bounds import matrix_equivalence
from excite.bounds.excitation import matrix_regularization
from excite.bounds.excitation.matrix_regularization import worst_perturbation
from excite.bounds.excitation.penalized import penalized_squared

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4)), RNG.normal(size=(12, 3))


def norm_by_search(w, p):
    """max ‖Wu‖₂ over ‖u‖_p = 1: corners for p = 1, many directions and the best one for p = 2."""
    if p == 1:
        return max(np.linalg.norm(w @ u) for u in np.eye(w.shape[1]))
    return np.sqrt(np.linalg.eigvalsh(w.T @ w)[-1])


@pytest.mark.parametrize("p", [1, 2])
def test_the_excited_problem_is_twice_the_regularized_one(p):
    same = matrix_equivalence(X, Y, radius=0.4, norm=p)
    assert same.holds
    assert same.penalty == pytest.approx(len(X) * 0.16)
    for w in (same.regularized, RNG.normal(size=(3, 4))):
        d = worst_perturbation(w, 0.4, p)
        assert np.linalg.norm(d, p) == pytest.approx(0.4)
        excited = sum(((y - w @ (x + d)) ** 2).sum() + ((y - w @ (x - d)) ** 2).sum() for x, y in zip(X, Y))
        regularized = ((Y - X @ w.T) ** 2).sum() + same.penalty * norm_by_search(w, p) ** 2
        assert excited == pytest.approx(2 * regularized)


@pytest.mark.parametrize("p", [1, 2])
def test_nothing_around_the_solution_is_lower(p):
    w, c = matrix_equivalence(X, Y, penalty=3.0, norm=p).regularized, 3.0

    def value(v):
        return ((Y - X @ v.T) ** 2).sum() + c * norm_by_search(v, p) ** 2

    least = value(w)
    for size in (1.0, 1e-2, 1e-4):
        assert min(value(w + size * RNG.normal(size=w.shape)) for _ in range(300)) > least


@pytest.mark.parametrize(("p", "dual"), [(1, "inf"), (2, "2"), ("inf", "1")])
def test_one_output_is_theorem_6(p, dual):
    same = matrix_equivalence(X, Y[:, :1], penalty=2.0, norm=p)
    assert same.regularized[0] == pytest.approx(penalized_squared(X, Y[:, 0], 2.0, dual), abs=1e-6)


@pytest.mark.parametrize("p", [1, 2, "inf"])
@pytest.mark.parametrize("shape", [(12, 4, 3), (5, 8, 2), (1, 1, 1)])
@pytest.mark.parametrize("radius", [0.05, 0.4, 3.0])
def test_corollary_3_by_two_solvers(p, shape, radius):
    count, n, m = shape
    rng = np.random.default_rng(count)
    same = matrix_equivalence(rng.normal(size=(count, n)), rng.normal(size=(count, m)), radius=radius, norm=p)
    assert same.holds
    assert same.excited is not same.regularized
    assert 0 <= same.difference < 1e-6


@pytest.mark.parametrize("solver", ["_solve", "_play"])
def test_two_solvers_differ_when_one_is_perturbed(solver, monkeypatch):
    found = getattr(matrix_regularization, solver)

    def perturbed(*args):
        w, gap = found(*args)
        return w + 1e-3, gap

    monkeypatch.setattr(matrix_regularization, solver, perturbed)
    same = matrix_equivalence(X, Y, radius=0.4)
    assert same.difference > 1e-4
    assert not same.holds
    assert "agree" in same.failed[0].text


def test_the_excited_problem_is_solved_against_plain_search():
    """Half of (b) with the worst of many d, minimized from many starts without gradients of the norm."""
    x, y, radius = np.array([[1.0, 0.2], [0.3, 2.0], [-1.0, 0.5]]), np.array([[1.0, 0.0], [0.5, 2.0], [0.0, 1.0]]), 0.7
    turns = np.linspace(0, np.pi, 721)
    ball = radius * np.stack([np.cos(turns), np.sin(turns)], 1)

    def value(flat):
        w = flat.reshape(2, 2)
        return ((y - x @ w.T) ** 2).sum() + len(x) * ((ball @ w.T) ** 2).sum(1).max()

    same = matrix_equivalence(x, y, radius=radius)
    starts = np.random.default_rng(0).normal(size=(5, 4))
    least = min(minimize(value, start, method="Powell", options={"xtol": 1e-9, "ftol": 1e-12}).fun for start in starts)
    assert value(same.excited.ravel()) <= least * (1 + 1e-5)


def test_extreme_radii_and_points_at_zero():
    for radius in (1e-6, 30.0):
        assert matrix_equivalence(X, Y, radius=radius).holds
    beyond = matrix_equivalence(X, Y, radius=1e6)  # of no use, and beyond the accuracy of the game: said, not concealed
    assert [assumption.text for assumption in beyond.failed] == ["both problems are solved"]
    nothing = matrix_equivalence(np.zeros((3, 2)), np.ones((3, 2)), radius=1.0)
    assert nothing.holds
    assert not nothing.excited.any()


def test_corollary_3_fails_for_other_norms_of_the_output():
    """x = 1, y = (2, 1): (b) with outputs in the ∞-norm shrinks both entries, (a) with λ max|W|² only the larger."""
    x, y, radius = 1.0, np.array([2.0, 1.0]), 0.5
    # d = ±ε is the worst perturbation in every norm, so that (b) is ridge regression.
    excited = y * x / (x**2 + radius**2)
    for penalty in np.linspace(0.01, 5, 200):
        larger = max(2 / (1 + penalty), (2 + 1) / (2 + penalty))  # alone, or both at the same size
        regularized = np.array([larger, min(1.0, larger)])
        assert np.abs(regularized - excited).max() > 0.05
    same = matrix_equivalence([[x]], [y], radius=radius, output_norm="inf")
    assert not same.holds
    assert same.penalty is None


def test_the_infinity_norm_of_many_inputs_has_no_solution():
    x = np.random.default_rng(0).normal(size=(12, 11))
    same = matrix_equivalence(x, np.ones((12, 2)), penalty=3.0, norm="inf")
    assert same.radius == pytest.approx(0.5)
    assert same.excited is None
    assert not same.holds
    assert "NP-hard" in str(same)
    with pytest.raises(ExciteError, match="at most 10 inputs"):
        worst_perturbation(np.ones((2, 11)), 0.5, "inf")


def test_the_infinity_norm_of_few_inputs_against_plain_search():
    """The worst of all corners, and the least value of (a) near the solution, by random moves."""
    rng = np.random.default_rng(3)
    x, y, radius = rng.normal(size=(9, 3)), rng.normal(size=(9, 2)), 0.4
    corners = np.array(list(itertools.product((1.0, -1.0), repeat=3)))

    def value(w):
        return ((y - x @ w.T) ** 2).sum() + len(x) * radius**2 * ((corners @ w.T) ** 2).sum(1).max()

    same = matrix_equivalence(x, y, radius=radius, norm="inf")
    for w in (same.excited, same.regularized):
        moves = [w + size * rng.normal(size=w.shape) for size in (1e-4, 1e-2, 0.3) for _ in range(300)]
        assert value(w) <= min(map(value, moves)) * (1 + 1e-9)
    d = worst_perturbation(same.excited, radius, "inf")
    assert abs(d) == pytest.approx(radius)
    assert np.linalg.norm(same.excited @ d) == pytest.approx(
        max(radius * np.linalg.norm(corners @ same.excited.T, axis=1))
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: matrix_equivalence(X, Y),
        lambda: matrix_equivalence(X, Y, penalty=1.0, radius=1.0),
        lambda: matrix_equivalence(X, Y[:5], penalty=1.0),
        lambda: matrix_equivalence(X, Y * np.nan, penalty=1.0),
        lambda: matrix_equivalence(X, Y, radius=-1.0),
    ],
)
def test_bad_problems(call):
    with pytest.raises(ExciteError):
        call()
