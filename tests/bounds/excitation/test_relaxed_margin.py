"""Corollary 2: support vectors near an affine subspace."""

from __future__ import annotations

import numpy as np
import pytest

from excite.bounds import relaxed_linear_margin
from excite.errors import InputError


@pytest.mark.parametrize("seed", range(8))
def test_the_limit_stays_below_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, 3)) + np.array([6.0, 0.0, 0.0])
    y = (x[:, 1] > 0).astype(int)
    x[:, 1] += 0.2 * np.where(y == 1, 1, -1)
    bound = relaxed_linear_margin(x, y)
    assert bound.holds
    assert bound.terms["limit margin"] <= bound.value * (1 + 1e-9)


def test_the_best_direction_is_no_worse_than_an_axis() -> None:
    x, y = np.array([[5.0, 0.0], [5.1, 1.0], [4.9, -1.0]]), np.array([0, 1, 0])
    best = relaxed_linear_margin(x, y)
    axis = relaxed_linear_margin(x, y, directions=[[1.0, 0.0]])
    assert axis.value is None or best.value <= axis.value * (1 + 1e-9)


def test_directions_are_checked() -> None:
    x, y = np.array([[5.0, 0.0], [5.1, 1.0]]), np.array([0, 1])
    with pytest.raises(InputError, match="orthonormal"):
        relaxed_linear_margin(x, y, directions=[[2.0, 0.0]])
    with pytest.raises(InputError, match="directions"):
        relaxed_linear_margin(x, y, offsets=[1.0])
