"""Exact arithmetic modulo primes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from bounds.trajectory.activations import draw, kronecker
from excite.bounds.trajectory import modular
from excite.bounds.trajectory.modular import Grams, inner, multiply, rationals


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


def test_an_unlucky_prime_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulo 3 the vector (1, 1, 1) has length 0: a basis without it would be too small."""
    drawn = iter([3, 33554467, 33554473, 33554501, 33554503, 33554509, 33554519])
    monkeypatch.setattr(modular, "_draw", lambda draws: next(drawn))
    grams = Grams([np.ones((1, 3), bool)])
    assert grams.depends([np.array([[1, 1, 1], [1, 1, 0]], bool)]).tolist() == [True, False]
    assert inner(grams.columns, grams.columns, 3) == 0
    assert 3 not in grams._primes
