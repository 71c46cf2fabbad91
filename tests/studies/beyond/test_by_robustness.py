"""Robust accuracy of studies: sizes in pixels."""

from __future__ import annotations

import pytest

from excite.studies.beyond.by_robustness import SIZES, in_pixels


def test_sizes_are_255ths_of_a_range_of_two() -> None:
    assert in_pixels(255) == 2.0
    assert [in_pixels(size) * 255 / 2 for size in SIZES] == pytest.approx(list(SIZES))
