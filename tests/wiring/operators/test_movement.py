"""Operators that move numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from excite.wiring import path_count
from wiring.operators.laws import X, between, law, tightness

CASES = {
    "view": (lambda h: h.view(-1, 2, 3).transpose(1, 2).flatten(1), 6, 24),
    "cat": (lambda h: torch.cat([h, 2 * h], 1), 12, 48),
    "repeat": (lambda h: h.repeat(1, 2), 12, 48),
    "select": (lambda h: h[:, 1:4], 3, 12),
}


@pytest.mark.parametrize("name", CASES)
def test_laws_bounds_and_paths(name: str) -> None:
    function, after, paths = CASES[name]
    assert law(function, after) in ("matrix", "channel")
    assert 0.2 < tightness(function, after) <= 1 + 1e-12
    assert path_count(between(function, after), X).total == paths


def test_a_detached_edge_has_no_law() -> None:
    assert law(lambda h: h.detach() + h) == "none"


def test_padding_with_zeros_keeps_the_law() -> None:
    assert law(lambda h: F.pad(h, (1, 1)), 8) == "matrix"
    assert law(lambda h: F.pad(h, (1, 1), value=1.0), 8) == "none"
