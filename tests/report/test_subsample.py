"""Fewer points that look the same."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from excite.report.subsample import between, extremes, grid, plain, within

CURVES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=400)


@given(CURVES, st.integers(4, 60))
def test_no_peak_is_lost(values, most):
    values = np.array(values)
    steps = np.arange(len(values)) * 3
    x, y = extremes(steps, values, most)
    assert len(x) <= max(most, 4)
    assert (x[0], x[-1]) == (steps[0], steps[-1])
    assert (np.diff(x) > 0).all()
    np.testing.assert_array_equal(y, values[x // 3])
    fine, kept = values[np.isfinite(values)], y[np.isfinite(y)]
    if len(fine):
        assert (kept.min(), kept.max()) == (fine.min(), fine.max())


def test_every_stretch_keeps_its_range():
    rng = np.random.default_rng(0)
    steps, values = np.arange(100_000), rng.standard_normal(100_000)
    x, y = extremes(steps, values, 1002)
    assert len(x) <= 1002
    for start in range(0, 100_000, 200):  # the slow version: 500 stretches, their ends looked up one by one
        inside = y[(x >= start) & (x < start + 200)]
        assert inside.min() == values[start : start + 200].min()
        assert inside.max() == values[start : start + 200].max()


def test_a_part_reaches_over_its_edges():
    steps, values = np.arange(0, 100, 10), np.arange(10.0)
    assert within(steps, values, 25, 52)[0].tolist() == [20, 30, 40, 50, 60]
    assert within(steps, values, None, None)[0].tolist() == steps.tolist()
    assert within(steps, values, -5, 5)[0].tolist() == [0, 10]
    assert within(steps, values, 500, 600)[0].tolist() == [90]


def test_a_grid_has_means_of_stretches_and_holes():
    curves = {
        "a": (np.array([0, 10, 20, 30]), np.array([1.0, 3.0, np.nan, 8.0])),
        "b": (np.array([20]), np.array([5.0])),
    }
    whole = grid(curves)
    assert whole.rows == ("a", "b")
    np.testing.assert_array_equal(whole.z, [[1, 3, np.nan, 8], [np.nan, np.nan, 5, np.nan]])
    half = grid(curves, 2)
    assert half.steps.tolist() == [0, 20]
    np.testing.assert_array_equal(half.z, [[2, 8], [np.nan, 5]])
    assert grid({}).z.shape == (0, 0)


@pytest.mark.parametrize("digits", [3, 6])
def test_numbers_for_json_are_close_and_never_nan(digits):
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [rng.standard_normal(50) * 10.0 ** rng.integers(-300, 300, 50), [0.0, 5e-324, 1.7e308, -1.7e308]]
    )
    np.testing.assert_allclose(plain(values, digits), values, rtol=10.0 ** (1 - digits) / 2 * 1.001)
    assert json.loads(json.dumps(plain(np.array([1.0, np.nan, np.inf])), allow_nan=False)) == [1, None, None]
    assert plain(np.array([1, 2])) == [1, 2]


def test_between_goes_through_the_extremes_of_stretches():
    first, last = np.array([0, 10, 20]), np.array([9, 19, 29])
    low, mean, high = np.array([0.0, 2.0, 1.0]), np.array([1.0, 3.0, 2.0]), np.array([2.0, 5.0, 4.0])
    steps, values = between(first, last, low, mean, high)
    assert steps.tolist() == [0, 9, 10, 19, 20, 29]
    assert values.tolist() == [0, 2, 5, 2, 1, 4]  # rising, falling, the end
