"""Counts beyond the range of floating point."""

from __future__ import annotations

import math

import torch

from excite.wiring.propagation.counts import ScaledCounts, total


def test_counts_grow_beyond_the_largest_float() -> None:
    counts = ScaledCounts(torch.ones(2, dtype=torch.float64))
    for _ in range(20):
        counts = counts.through(lambda v: v * 2.0**100)
    assert bool(torch.isfinite(counts.values).all())
    assert math.log2(float(counts.values[0])) + counts.power == 2000


def test_sums_use_the_larger_exponent() -> None:
    small, large = ScaledCounts(torch.tensor([8.0]), 0), ScaledCounts(torch.tensor([1.0]), 3)
    summed = total([small, large])
    assert float(summed.values) * 2.0**summed.power == 16
    assert float(small.plus_one().values) == 9
