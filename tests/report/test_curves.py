"""Distribution functions, their largest distance, and smoothing and thinning of series."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from excite.report.curves import curve, expected_gap, smooth, thin, widest_gap


@pytest.mark.parametrize("n", [1, 5, 200])
def test_the_gap_is_the_two_sample_statistic(n):
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=n), rng.normal(0.3, 1, size=2 * n)
    at, low, high = widest_gap(a, b)
    assert high - low == pytest.approx(ks_2samp(a, b).statistic)
    assert abs((a <= at).mean() - (b <= at).mean()) == pytest.approx(high - low)
    assert widest_gap(np.full(3, np.inf), np.full(3, np.inf))[1:] == (0, 0)
    assert widest_gap(np.array([1.0, np.inf]), np.array([np.inf, np.inf]))[2] == 0.5


def test_the_gap_of_chance_is_what_equal_distributions_show():
    rng = np.random.default_rng(0)
    gaps = [ks_2samp(rng.random(300), rng.random(500)).statistic for _ in range(300)]
    assert expected_gap(300, 500) == pytest.approx(np.mean(gaps), rel=0.1)


def test_curves_for_drawing():
    x, y = curve(np.array([0.0, 0.5, 0.5, np.inf]), 1.0)
    assert list(zip(x, y)) == [(0.0, 0.25), (0.0, 0.25), (0.5, 0.75), (1.0, 0.75)]
    values = np.random.default_rng(0).random(500)
    assert smooth(values)[-1] == pytest.approx(values[-10:].mean())
    assert smooth(values)[0] == values[0]
    assert len(thin(np.arange(10**6))) <= 2001
    assert thin(np.arange(10**6))[-1] == 10**6 - 1
