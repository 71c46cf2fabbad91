"""The program over inner products against the explicit one over Kronecker products; dependence against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from scipy.optimize import linprog

from excite.bounds.trajectory import modular
from excite.bounds.trajectory.modular import Array, Grams, inner, multiply, rationals
from excite.bounds.trajectory.pursuit import pursue
from excite.bounds.trajectory.rounded import rounded


def draw(rng: np.random.Generator, count: int, widths: tuple[int, ...], share: float = 0.75) -> list[Array]:
    return [rng.random((count, width)) < share for width in widths]


def kronecker(layers: list[Array]) -> Array:
    """(entries, N): the vectors themselves."""
    rows = [reduce(np.kron, [layer[i].astype(float) for layer in reversed(layers)]) for i in range(len(layers[0]))]
    return np.stack(rows, 1)


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


def test_copies_of_a_pattern_cost_what_the_cheapest_costs_and_dead_points_nothing() -> None:
    columns = [np.array([[1, 1], [1, 1], [0, 0]], bool)]
    found = pursue(columns, np.array([5.0, 2.0, 7.0]), [np.array([[1, 1], [0, 0], [1, 0]], bool)], 1.0)
    assert found.values.tolist() == [2.0, 0.0, np.inf]
    assert found.same.tolist() == [True, True, False]
    nothing = pursue([np.zeros((2, 3), bool)], np.ones(2), [np.eye(3, dtype=bool)], 1.0)
    assert not nothing.reached.any()
    assert nothing.rank == 0


def test_products_and_rationals_modulo_primes_are_exact() -> None:
    rng = np.random.default_rng(1)
    primes = [modular._draw(rng) for _ in range(5)]
    p = primes[0]
    assert all(all(q % n for n in range(2, 8200)) for q in primes)
    a, b = rng.integers(0, p, (70, 900)), rng.integers(0, p, (900, 5))
    assert (multiply(a, b, p) == (a.astype(object) @ b.astype(object)) % p).all()
    wanted = [Fraction(n, d) for n, d in ((0, 1), (-1, 1), (1, 3), (-22, 7), (123456789, 1000))]
    residues = [np.array([f.numerator * pow(f.denominator, -1, q) % q for f in wanted]) for q in primes]
    assert rationals(residues, primes).tolist() == [float(f) for f in wanted]
    with pytest.raises(modular.TooLong):
        rationals([rng.integers(0, q, 1) for q in primes], primes)


def test_coefficients_with_many_digits_take_more_primes() -> None:
    """Over 0/1 vectors of length 40 coefficients are ratios of determinants."""
    rng = np.random.default_rng(5)
    columns, new = draw(rng, 40, (40,), 0.5), draw(rng, 2, (40,), 0.5)
    assert Grams(columns).depends(new).all()
    basis, found, missed = Grams(columns).coefficients(new)
    np.testing.assert_allclose(kronecker(columns)[:, basis] @ found, kronecker(new), rtol=0, atol=1e-10)
    assert not missed.any()


@pytest.mark.parametrize(("widths", "count"), [((40,), 60), ((6, 5), 60), ((3, 4, 3), 60)])
def test_rounded_coefficients_miss_by_no_more_than_is_said(widths: tuple[int, ...], count: int) -> None:
    rng = np.random.default_rng(8)
    columns, new = draw(rng, count, widths, 0.6), draw(rng, 30, widths, 0.6)
    grams = Grams(columns)
    inside = [layer[grams.depends(new)] for layer in new]
    basis, exact, _ = grams.coefficients(inside)
    found, missed = rounded([layer[basis] for layer in columns], inside)
    assert found.size
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-9 * np.abs(exact).max())
    off = np.linalg.norm(kronecker(columns)[:, basis] @ found - kronecker(inside), axis=0)
    assert (off <= missed).all()
    assert (missed < 1e-3).all()


def test_where_exact_coefficients_are_too_long_the_program_rounds_and_stays_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(2)
    columns, new, cost = draw(rng, 60, (30,), 0.5), draw(rng, 20, (30,), 0.5), rng.random(60) + 0.1
    exact = pursue(columns, cost, new, 1.0)
    monkeypatch.setattr(modular, "MOST_PRIMES", 1)
    monkeypatch.setattr(modular, "PRIMES", 2)
    near = pursue(columns, cost, new, 1.0)
    assert exact.rounding == 0 < near.rounding < 1e-4
    assert (near.values >= exact.values).all()
    np.testing.assert_allclose(near.values, exact.values, rtol=1e-4)


def test_an_unlucky_prime_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulo 3 the vector (1, 1, 1) has length 0: a basis without it would be too small."""
    drawn = iter([3, 33554467, 33554473, 33554501, 33554503, 33554509, 33554519])
    monkeypatch.setattr(modular, "_draw", lambda draws: next(drawn))
    grams = Grams([np.ones((1, 3), bool)])
    assert grams.depends([np.array([[1, 1, 1], [1, 1, 0]], bool)]).tolist() == [True, False]
    assert inner(grams.columns, grams.columns, 3) == 0
    assert 3 not in grams._primes
