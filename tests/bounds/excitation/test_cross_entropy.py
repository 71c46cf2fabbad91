"""Theorem 2 and Corollary 2: true on random separable points and trainings; what is printed is not."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy.linalg import null_space

from bounds.trainings import separable_points, train_linear
from excite import ExciteError
from excite.bounds import linear_margin, linear_margin_any_time, relaxed_linear_margin

RNG = np.random.default_rng(7)
PROBLEMS = [separable_points(RNG) for _ in range(60)]
SLACK = 1 + 1e-9


@pytest.fixture(scope="module")
def trained():
    rate = torch.tensor(10 ** RNG.uniform(-0.5, 0.3, len(PROBLEMS)))
    return train_linear(PROBLEMS, 6000, rate)


def test_theorem_2_bounds_the_margin_of_the_limit():
    printed = 0
    for x, y in PROBLEMS:
        bound = linear_margin(x, y)
        assert bound.holds
        assert bound.terms["limit margin"] <= bound.value * SLACK
        assert bound.value <= bound.terms["optimal margin of the support vectors"] * SLACK
        printed += bound.terms["limit margin"] > bound.terms["printed"] * SLACK
    assert printed > 0


@pytest.mark.slow
def test_theorem_2_bounds_the_margin_of_trained_classifiers(trained):
    valued = 0
    for (x, y), (w, b) in zip(PROBLEMS, trained):
        bound = linear_margin(x, y, w, b)
        if bound.value is None:
            assert bound.terms["angle"] > 0.1
            continue
        valued += 1
        # The margin written out: the nearest point's distance from the line.
        margin = min((2 * t - 1) * (p @ w + b) for p, t in zip(x, y)) / np.linalg.norm(w)
        assert margin == pytest.approx(bound.terms["margin"])
        assert margin <= bound.value * SLACK
        assert bound.value >= bound.terms["limit value"] / SLACK
    assert valued > 50


def test_training_goes_to_the_limit(trained):
    """The hyperplane of least norm in (w, b) is where gradient descent goes: ten times the steps, a fraction of the angle."""

    def angles(classifiers):
        return np.array([linear_margin(x, y, w, b).terms["angle"] for (x, y), (w, b) in zip(PROBLEMS, classifiers)])

    early = angles(train_linear(PROBLEMS, 600, torch.ones(len(PROBLEMS), dtype=torch.float64)))
    late = angles(trained)
    assert np.median(late / early) < 0.25
    assert np.median(late) < 0.02
    assert (late < early).mean() > 0.95


def test_theorem_2_fails_as_printed():
    """I = {(−3, 3)}, J = {(−2, 4), (−1, 2)}: by hand w = (−19, −10)/14, B = −13/14."""
    x, y = [[-3, 3], [-2, 4], [-1, 2]], [1, 0, 0]
    bound = linear_margin(x, y)
    assert bound.terms["limit weight"] == pytest.approx(np.array([-19, -10]) / 14)
    assert bound.terms["B"] == pytest.approx(-13 / 14)
    assert bound.terms["limit margin"] == pytest.approx(14 / np.sqrt(461))  # 0.652
    assert bound.terms["printed"] == pytest.approx(0.5147, abs=1e-4)
    assert bound.terms["printed"] < bound.terms["limit margin"]
    assert bound.value == pytest.approx(14 / np.sqrt(461))


def test_theorem_2_fails_as_printed_on_the_smallest_points():
    """I = {(1, 1)}, J = {(−2, 0), (1, 2)}: margin 2/5, printed bound 6/17. One point against two fails nowhere in {−1, 0, 1}²."""
    bound = linear_margin([[1, 1], [-2, 0], [1, 2]], [1, 0, 0])
    assert bound.terms["limit margin"] == pytest.approx(2 / 5)
    assert bound.terms["printed"] == pytest.approx(6 / 17)
    assert bound.value == pytest.approx(2 / 5)
    grid = list(product((-1, 0, 1), repeat=2))
    for one in ((0, 0), (1, 0), (1, 1)):  # the others by symmetry
        for two in combinations([p for p in grid if p != one], 2):
            small = linear_margin([one, *two], [1, 0, 0])
            assert small.value is None or small.terms["limit margin"] <= small.terms["printed"] * SLACK


def test_corollary_2_needs_offsets_of_the_sign_of_b():
    """I = {1}, J = {−10}, Δ = −10: the formula says 0.55, the margin is 2."""
    bound = relaxed_linear_margin([[1.0], [-10.0]], [1, 0], [[1.0]], [-10.0])
    assert bound.terms["printed"] == pytest.approx(0.55)
    assert bound.terms["limit margin"] == pytest.approx(2.0)
    assert bound.value is None
    assert "same sign" in bound.failed[0].text
    assert relaxed_linear_margin([[1.0], [-10.0]], [1, 0], [[1.0]]).value == pytest.approx(5.5)


def normals_of(points):
    """Orthonormal r_k with r_k·x the same number Δ_k for all points: the null space of their differences."""
    normals = null_space(np.vstack([points[1:] - points[0], np.zeros((1, points.shape[1]))]), rcond=1e-9).T
    return normals, normals @ points[0]


def test_corollary_2_with_the_best_direction_and_with_others():
    for x, y in PROBLEMS:
        best = relaxed_linear_margin(x, y)
        assert best.holds
        assert best.terms["limit margin"] <= best.value * SLACK
        # The normals of Theorem 2 qualify, with the sign that puts BΔ ≥ 0, and do no better than the one best direction.
        exact = linear_margin(x, y)
        normals, offsets = normals_of(x[exact.terms["support"]])
        assert (offsets @ offsets) ** 0.5 == pytest.approx(exact.terms["distance of the subspace"], abs=1e-9)
        assert len(normals) == x.shape[1] - exact.terms["dimension of the subspace"]
        normals = np.where(offsets * exact.terms["B"] >= 0, 1, -1)[:, None] * normals
        if len(normals):
            other = relaxed_linear_margin(x, y, normals)
            assert other.holds
            assert best.value <= other.value * (1 + 1e-6)
            assert other.terms["limit margin"] <= other.value * SLACK


def test_offsets_outside_the_gap_are_said():
    bound = relaxed_linear_margin([[1.0], [-10.0]], [1, 0], [[1.0]], [3.0])
    assert bound.value is None
    assert "between" in bound.failed[0].text


def test_any_time_bound_holds_from_the_first_steps_with_momentum():
    rate = torch.full((len(PROBLEMS),), 0.5, dtype=torch.float64)
    for steps, momentum in ((3, 0.0), (40, 0.9)):
        said = 0
        for (x, y), (w, b) in zip(PROBLEMS, train_linear(PROBLEMS, steps, rate, momentum)):
            bound = linear_margin_any_time(x, y, w, b)
            assert bound.value is not None or [a.text for a in bound.failed] == ["the weight separates the classes"]
            if bound.value is not None:
                assert bound.terms["margin"] <= bound.value * SLACK
                said += bound.value < bound.terms["optimal margin"] / (1 + 1e-6)
        assert said > 5  # it says more than the optimal margin where the points lie in a subspace


def test_any_time_bound_counts_the_initial_weight():
    x, y = np.array([[1.0, 3.0], [-1.0, 3.0]]), [1, 0]
    s, start = np.array([1.0, -1.0]), np.array([0.3, -0.8])
    w, b = start.copy(), 0.4
    for _ in range(50):
        pull = s / (1 + np.exp(s * (x @ w + b)))
        w, b = w + 0.1 * pull @ x, b + 0.1 * pull.sum()
    assert linear_margin_any_time(x, y, w, b, start, 0.4).holds
    assert [a.text for a in linear_margin_any_time(x, y, w, b).failed] == ["steps lie in the span of the points"]


def test_a_direction_that_still_moves_leaves_no_value():
    x, y = [[-3, 3], [-2, 4], [-1, 2]], [1, 0, 0]
    bound = linear_margin(x, y, [-1.0, 0.0], -2.5)
    assert bound.value is None
    assert "converged" in bound.failed[0].text


@pytest.mark.parametrize("function", [linear_margin, relaxed_linear_margin])
def test_points_that_cannot_be_separated_and_one_class(function):
    bound = function([[0.0], [1.0], [2.0]], [0, 1, 0])
    assert bound.value is None
    assert "separates" in bound.failed[0].text
    bound = function([[0.0], [1.0]], [1, 1])
    assert bound.value is None
    assert "both classes" in bound.failed[0].text


@pytest.mark.parametrize("function", [linear_margin, relaxed_linear_margin])
def test_points_too_far_for_double_precision_leave_no_value(function):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)) + 1e9
    bound = function(x, (x[:, 0] > 1e9).astype(int))
    assert bound.value is None
    assert "solved" in bound.failed[0].text


@pytest.mark.parametrize(
    "call",
    [
        lambda: linear_margin([[1.0], [-1.0]], [1, 0], [1.0]),
        lambda: linear_margin([[1.0], [-1.0]], [1, 0], [1.0, 2.0], 0.0),
        lambda: linear_margin([[1.0], [-1.0]], [1, 0], [float("nan")], 0.0),
        lambda: linear_margin([[1.0], [-1.0]], [1, 0], np.ones((2, 1)), 0.0),
        lambda: linear_margin([[1.0], [-1.0]], [1, 0], [0.0], 0.0),
        lambda: relaxed_linear_margin([[1.0], [-1.0]], [1, 0], [[2.0]]),
        lambda: relaxed_linear_margin([[1.0], [-1.0]], [1, 0], None, [1.0]),
        lambda: relaxed_linear_margin([[1.0], [-1.0]], [1, 0], [[1.0]], [1.0, 2.0]),
        lambda: linear_margin_any_time([[1.0], [-1.0]], [1, 0], [1.0], 0.0, [1.0, 2.0]),
    ],
)
def test_bad_classifiers_and_directions(call):
    with pytest.raises(ExciteError):
        call()
