"""Penalized least squares in three norms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from excite.bounds.excitation.penalized import duality_gap, penalized, penalized_squared, size


@pytest.mark.parametrize("norm", ["1", "2", "inf"])
@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 3.0])
def test_solutions_are_optimal(norm, power: float) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), rng.normal(size=12)
    w = penalized(x, y, 0.7, norm, power)
    assert duality_gap(x, y, w, 0.7, norm, power) < 1e-10

    def objective(v: np.ndarray) -> float:
        return float(((y - x @ v) ** 2).sum() + 0.7 * size(v, norm) ** power)

    found = min(minimize(objective, start, method="Nelder-Mead").fun for start in (w, np.zeros(4)))
    assert objective(w) <= found + 1e-9


def test_the_square_of_the_two_norm_is_ridge() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=9)
    ridge = np.linalg.solve(x.T @ x + 0.5 * np.eye(3), x.T @ y)
    np.testing.assert_allclose(penalized_squared(x, y, 0.5, "2"), ridge, rtol=1e-9)
