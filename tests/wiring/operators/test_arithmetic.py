"""Sums, products and maxima."""

from __future__ import annotations

import pytest
import torch

from excite.errors import ModelError
from excite.wiring import path_count
from wiring.operators.laws import X, between, law, tightness

CASES = {
    "sum": (lambda h: h + h.flip(1), "matrix"),
    "scaled": (lambda h: -3 * h, "matrix"),
    "maximum": (lambda h: torch.maximum(h, 0.5 * h), "channel"),
    "constant": (lambda h: h + 1.0, "none"),
    "square": (lambda h: h.square(), "channel"),
    "where": (lambda h: torch.where(h > 0, h, 0.1 * h), "channel"),
}


@pytest.mark.parametrize("name", CASES)
def test_laws(name: str) -> None:
    function, expected = CASES[name]
    assert law(function) == expected


@pytest.mark.parametrize("name", ["sum", "scaled", "maximum", "constant"])
def test_bounds_are_not_exceeded(name: str) -> None:
    assert 0.1 < tightness(CASES[name][0]) <= 1 + 1e-12


def test_sums_add_paths_and_products_of_signals_have_none() -> None:
    assert path_count(between(lambda h: h + h.flip(1)), X).total == 2 * 24
    with pytest.raises(ModelError, match="mul with these arguments"):
        path_count(between(lambda h: h * h), X)
