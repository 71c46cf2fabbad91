"""The program over inner products against the explicit one over Kronecker products; dependence against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import linprog

from bounds.trajectory.activations import draw, kronecker
from excite.bounds.trajectory.modular import Array, Grams
from excite.bounds.trajectory.pursuit import pursue


def rank(matrix: Array) -> int:
    """In fractions."""
    rows = [[Fraction(int(v)) for v in row] for row in matrix]
    found = 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(found, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        for i in range(found + 1, len(rows)):
            if rows[i][column]:
                factor = rows[i][column] / rows[found][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[found])]
        found += 1
    return found


def explicit(columns: list[Array], cost: Array, new: list[Array]) -> Array:
    matrix, sides = kronecker(columns), kronecker(new)
    values = []
    for s in sides.T:
        nearest = np.linalg.lstsq(matrix, s, rcond=None)[0]
        if np.linalg.norm(matrix @ nearest - s) > 1e-8:
            values.append(np.inf)
            continue
        tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        found = linprog(np.tile(cost, 2), A_eq=np.hstack([matrix, -matrix]), b_eq=s, method="highs", options=tight)
        assert found.status == 0
        values.append(found.fun)
    return np.array(values)


# Depth d has d − 1 hidden layers; depths 2 to 5.
@pytest.mark.parametrize("widths", [(7,), (3, 3), (4, 3), (6, 5), (3, 3, 3), (2, 4, 3), (2, 2, 2, 3)])
@pytest.mark.parametrize("count", [4, 15, 60])
def test_the_kernel_program_is_the_kronecker_program(widths: tuple[int, ...], count: int) -> None:
    rng = np.random.default_rng(count)
    columns, new, cost = draw(rng, count, widths), draw(rng, 20, widths), rng.random(count) + 0.1
    expected = explicit(columns, cost, new)
    found = pursue(columns, cost, new, 1.0)
    assert (found.reached == np.isfinite(expected)).all()
    some = found.reached
    np.testing.assert_allclose(found.values[some], expected[some], rtol=0, atol=1e-10)
    if count == 60:
        assert some.any()
        assert found.programs


@pytest.mark.parametrize("widths", [(6,), (4, 4), (3, 3, 3)])
def test_dependence_is_that_of_exact_fractions(widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    columns, new = draw(rng, 10, widths), draw(rng, 25, widths)
    matrix, sides = kronecker(columns), kronecker(new)
    expected = [rank(np.column_stack([matrix, s])) == rank(matrix) for s in sides.T]
    assert Grams(columns).depends(new).tolist() == expected
    assert len(Grams(columns).basis(0)[1]) == rank(matrix)


def test_depth_does_not_limit_exactness() -> None:
    """Twelve layers of 60: inner products of 60¹² do not fit any machine word, and near copies are told apart."""
    rng = np.random.default_rng(0)
    columns = draw(rng, 20, (60,) * 12, 0.9)
    near = [layer[:3].copy() for layer in columns]
    near[5][0] ^= np.eye(60, dtype=bool)[7]  # one unit of one layer
    found = pursue(columns, np.ones(20), near, 1.0)
    assert found.reached.tolist() == [False, True, True]
    assert found.values[1] == found.values[2] == 1


def test_a_single_unit_of_the_last_layer_is_a_difference() -> None:
    """s = s₁ − s₂ + s₃ costs the sum of the three."""
    first = np.array([[1, 1, 0], [1, 1, 0], [1, 1, 0]], bool)
    second = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1]], bool)
    new = [first[:1], np.array([[1, 1, 1]], bool)]
    found = pursue([first, second], np.array([2.0, 3.0, 4.0]), new, 1.0)
    assert found.values.tolist() == [9.0]
    assert not found.same.any()


def test_copies_cost_the_cheapest_and_dead_points_nothing() -> None:
    columns = [np.array([[1, 1], [1, 1], [0, 0]], bool)]
    found = pursue(columns, np.array([5.0, 2.0, 7.0]), [np.array([[1, 1], [0, 0], [1, 0]], bool)], 1.0)
    assert found.values.tolist() == [2.0, 0.0, np.inf]
    assert found.same.tolist() == [True, True, False]
    nothing = pursue([np.zeros((2, 3), bool)], np.ones(2), [np.eye(3, dtype=bool)], 1.0)
    assert not nothing.reached.any()
    assert nothing.rank == 0
