"""Comparisons do not see positive factors."""

from __future__ import annotations

from wiring.operators.laws import law


def test_a_comparison_with_zero_keeps_the_law_and_others_do_not() -> None:
    assert law(lambda h: h * (h > 0)) == "channel"
    assert law(lambda h: h * h.sign()) == "channel"
    assert law(lambda h: h * (h > 1)) == "none"
