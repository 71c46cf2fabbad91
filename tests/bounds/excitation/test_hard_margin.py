"""Hyperplanes against enumeration and against another library."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bounds.references import least_norm_by_enumeration, optimal_margin_by_enumeration
from bounds.trainings import separable_points
from excite import ExciteError
from excite.bounds.excitation.hard_margin import limit_hyperplane, margin_of, optimal_hyperplane, separation, signed


def small(seed: int, n: int = 2, count: int = 7):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, n)) + 2 * rng.normal(size=n)
    along = x @ rng.normal(size=n)
    return x, (along > np.median(along)).astype(int)


@pytest.mark.parametrize("seed", range(20))
def test_hyperplanes_against_enumeration(seed):
    x, y = small(seed)
    s = 2.0 * y - 1
    limit, best = limit_hyperplane(x, s), optimal_hyperplane(x, s)
    z = least_norm_by_enumeration(s[:, None] * np.column_stack([x, np.ones(len(x))]))
    assert np.r_[limit.weight, limit.bias] == pytest.approx(z, rel=1e-8, abs=1e-9 * np.linalg.norm(z))
    assert best.margin == pytest.approx(optimal_margin_by_enumeration(x, y), rel=1e-9)
    assert margin_of(best.weight, best.bias, x, s) == pytest.approx(best.margin, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_optimal_margin_against_scikit_learn(seed):
    from sklearn.svm import SVC

    x, y = small(seed, n=5, count=30)
    theirs = SVC(kernel="linear", C=1e10, tol=1e-9).fit(x, y)
    assert optimal_hyperplane(x, 2.0 * y - 1).margin == pytest.approx(1 / np.linalg.norm(theirs.coef_), rel=1e-4)


def test_duality_gaps_are_rounding_over_scales():
    rng = np.random.default_rng(3)
    for _ in range(100):
        x, y = separable_points(rng)
        x = x * 10 ** rng.uniform(-3, 3)
        s = 2.0 * y - 1
        assert separation(x, s) > 1e-8
        assert limit_hyperplane(x, s).gap < 1e-9
        assert optimal_hyperplane(x, s).gap < 1e-9


def test_many_points_join_as_they_are_violated():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 10))
    w = rng.normal(size=10)
    y = (x @ w > 0).astype(int)
    x = x + 0.2 * (2 * y - 1)[:, None] * w
    limit = limit_hyperplane(x, 2.0 * y - 1)
    assert limit.gap < 1e-12
    assert ((2 * y - 1) * (x @ limit.weight + limit.bias)).min() == pytest.approx(1, abs=1e-9)


def test_more_dimensions_than_points():
    rng = np.random.default_rng(0)
    x, s = rng.normal(size=(6, 40)), np.array([1.0, -1, 1, -1, 1, -1])
    limit = limit_hyperplane(x, s)
    z = least_norm_by_enumeration(s[:, None] * np.column_stack([x, np.ones(6)]))
    assert np.r_[limit.weight, limit.bias] == pytest.approx(z, abs=1e-10)
    assert separation(x, s) > 0.1
    assert optimal_hyperplane(x, s).gap < 1e-9


def test_separation_says_what_cannot_be_separated():
    x = np.array([[0.0, 0], [1, 1], [0, 1], [1, 0]])
    assert separation(x, np.array([1.0, 1, -1, -1])) == pytest.approx(0, abs=1e-9)
    assert separation(x, np.array([1.0, -1, -1, -1])) > 0.1
    # Through the origin: (1, 1) and (2, 2) cannot be told apart, with a bias they can.
    line, s = np.array([[1.0, 1], [2, 2]]), np.array([1.0, -1])
    assert separation(line, s) > 0.1
    assert separation(line, s, bias=False) == pytest.approx(0, abs=1e-9)


def test_labels_come_as_columns_tensors_and_booleans():
    x = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    for y in ([1, 0], torch.tensor([[1.0], [0.0]]), np.array([True, False])):
        assert signed(x, y)[1].tolist() == [1, -1]


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([[1.0], [np.nan]], [0, 1]),
        ([[1.0], [2.0]], [0, 1, 1]),
        ([[1.0], [2.0]], [0, 2]),
        ([1.0, 2.0], [0, 1]),
        (np.zeros((0, 2)), []),
        ("points", [0]),
    ],
)
def test_bad_points_and_labels(x, y):
    with pytest.raises(ExciteError):
        signed(x, y)
