"""The distance of two margin curves and its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from excite.margin import Margins
from excite.report.curves import widest_gap


def made(values: list[float], norm: str = "inf") -> Margins:
    return Margins(torch.tensor(values, dtype=torch.float64), norm)  # type: ignore[arg-type]


some = st.lists(st.one_of(st.integers(0, 8).map(lambda k: k / 4), st.just(math.inf)), min_size=1, max_size=30)


@pytest.mark.slow
@given(some, some)
@settings(max_examples=200)
def test_gap_is_the_largest_difference_of_the_curves(a: list[float], b: list[float]) -> None:
    first, second = made(a), made(b)
    at = np.unique([v for v in a + b if math.isfinite(v)])
    slow = max((abs(first.within(e) - second.within(e)) for e in at), default=0.0)
    gap = first.gap(second, resamples=20)
    assert float(gap) == pytest.approx(slow, abs=1e-12)
    assert float(gap) == pytest.approx(float(second.gap(first, resamples=20)), abs=1e-12)
    assert 0 <= gap.low <= gap.value <= gap.high <= 1
    assert float(first.gap(first, resamples=20)) == 0


def test_gap_agrees_with_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.exponential(size=300), rng.exponential(1.3, size=200)
    assert float(made(a.tolist()).gap(made(b.tolist()))) == pytest.approx(ks_2samp(a, b).statistic)


def test_censored_points_count_as_never_misclassified() -> None:
    # curves end at 1/2 and 1: the gap is there, although both agree on every finite margin but one
    assert float(made([0.1, math.inf]).gap(made([0.1, 0.1]))) == 0.5
    assert float(made([math.inf]).gap(made([math.inf]))) == 0


@pytest.mark.slow
def test_the_interval_covers_the_true_gap_or_zero() -> None:
    rng = np.random.default_rng(1)
    same = other = 0
    for i in range(60):
        a, b, c = rng.uniform(size=80), rng.uniform(size=120), rng.uniform(0.3, 1.3, size=120)
        gap = made(a.tolist()).gap(made(b.tolist()), resamples=200, seed=i)
        same += gap.low == 0
        gap = made(a.tolist()).gap(made(c.tolist()), resamples=200, seed=i)
        other += gap.low <= 0.3 <= gap.high
        assert gap.low > 0 or gap.value < 0.3
    assert same >= 54
    assert other >= 54


def test_the_interval_shrinks_with_points_and_excludes_zero() -> None:
    rng = np.random.default_rng(2)
    widths = []
    for n in (50, 800):
        gap = made(rng.uniform(size=n).tolist()).gap(made(rng.uniform(0.5, 1.5, size=n).tolist()), resamples=300)
        assert gap.low > 0
        widths.append(gap.high - gap.low)
    assert widths[1] < 0.4 * widths[0]


def test_one_distance_in_margins_reports_and_scipy() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.uniform(size=40).round(2), rng.uniform(0.2, 1.2, size=31).round(2)
    expected = ks_2samp(a, b).statistic
    assert abs(float(made(a.tolist()).gap(made(b.tolist()), resamples=1)) - expected) < 1e-12
    at, low, high = widest_gap(a, b)
    assert abs(high - low - expected) < 1e-12
    assert [low, high] == pytest.approx(sorted([(a <= at).mean(), (b <= at).mean()]), abs=1e-12)
    assert widest_gap(np.array([math.inf]), np.array([math.inf])) == (0.0, 0.0, 0.0)
