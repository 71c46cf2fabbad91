"""The newest values of a metric, and the largest of all."""

import math

from excite.monitor.alerts import Series
from excite.monitor.alerts.series import _MAX_VALUES


def series_of(values):
    series = Series()
    for step, value in enumerate(values):
        series.add(10 * step, value)
    return series


def test_windows_and_newest_values():
    series = series_of([3.0, 1.0, 4.0, 1.5])
    assert series.between(0, 20) == [1.0, 4.0]
    assert series.newest(2) == [4.0, 1.5]
    assert series.newest(9) == [3.0, 1.0, 4.0, 1.5]


def test_the_largest_value_is_finite_and_outlasts_the_window():
    series = series_of([7.0, math.inf, math.nan, *[1.0] * _MAX_VALUES])
    assert series.largest == 7.0
    assert len(series.values) == len(series.steps) == _MAX_VALUES


def test_a_restored_series_is_equal():
    series, restored = series_of([3.0, 1.0, math.inf]), Series()
    restored.load_state_dict(series.state_dict())
    assert (restored.steps, restored.values, restored.largest) == (series.steps, series.values, series.largest)
