"""Rounded coefficients where exact ones are too long."""

from __future__ import annotations

import numpy as np
import pytest

from bounds.trajectory.activations import draw, kronecker
from excite.bounds.trajectory import modular
from excite.bounds.trajectory.modular import Grams
from excite.bounds.trajectory.pursuit import pursue
from excite.bounds.trajectory.rounded import rounded


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


def test_the_program_rounds_long_coefficients_and_stays_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(2)
    columns, new, cost = draw(rng, 60, (30,), 0.5), draw(rng, 20, (30,), 0.5), rng.random(60) + 0.1
    exact = pursue(columns, cost, new, 1.0)
    monkeypatch.setattr(modular, "MAX_PRIMES", 1)
    monkeypatch.setattr(modular, "PRIMES", 2)
    near = pursue(columns, cost, new, 1.0)
    assert exact.rounding == 0 < near.rounding < 1e-4
    assert (near.values >= exact.values).all()
    np.testing.assert_allclose(near.values, exact.values, rtol=1e-4)
