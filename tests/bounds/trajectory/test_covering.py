"""Covering numbers of samples, from below and from above."""

from __future__ import annotations

import math

import pytest
import torch

from excite.bounds import covering_number
from excite.errors import InputError


@pytest.mark.parametrize("radius", [0.05, 0.2, 0.5, 2.0])
def test_bounds_on_a_grid_of_the_line(radius: float) -> None:
    """Balls of radius r cover the interval [0, 1] if there are at least 1/2r of them."""
    cover = covering_number(torch.linspace(0, 1, 101, dtype=torch.float64)[:, None], radius)
    needed = max(1, math.ceil(1 / (2 * radius) - 1e-9))
    assert cover.at_least <= needed <= cover.at_most
    assert (cover.points, cover.dimension) == (101, 1)


def test_limits() -> None:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    assert (covering_number(x, 0.0).at_least, covering_number(x, 0.0).at_most) == (7, math.inf)
    assert covering_number(x, math.inf).at_most == 1
    with pytest.raises(InputError):
        covering_number(x, -1.0)
