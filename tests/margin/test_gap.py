"""Curves, gaps and what they are stored as."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from excite.errors import InputError
from excite.margin import Evidence, Gap, Margins, margins
from excite.report.curves import widest_gap
from models import build


def made(values: list[float], norm: str = "inf") -> Margins:
    return Margins(torch.tensor(values, dtype=torch.float64), norm)  # type: ignore[arg-type]


some = st.lists(st.one_of(st.integers(0, 8).map(lambda k: k / 4), st.just(math.inf)), min_size=1, max_size=30)


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


def test_the_interval_covers_the_true_gap_and_zero_where_there_is_none() -> None:
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


def test_the_interval_shrinks_with_more_points_and_differs_from_zero_for_different_curves() -> None:
    rng = np.random.default_rng(2)
    widths = []
    for n in (50, 800):
        gap = made(rng.uniform(size=n).tolist()).gap(made(rng.uniform(0.5, 1.5, size=n).tolist()), resamples=300)
        assert gap.low > 0
        widths.append(gap.high - gap.low)
    assert widths[1] < 0.4 * widths[0]


def test_within_counts_margins_up_to_and_including_epsilon() -> None:
    found = made([0.0, 0.1, 0.2, math.inf])
    assert found.within(0) == 0.25
    assert found.within(0.1) == 0.5
    assert found.within(1e9) == 0.75
    np.testing.assert_allclose(found.within([0.05, 0.2]), [0.25, 0.75])
    np.testing.assert_allclose(found.within(torch.tensor([0.15, 0.2], dtype=torch.float64)), [0.5, 0.75])
    with pytest.raises(InputError, match="at least 0"):
        found.within(-1)


def test_median_and_quartiles_with_censored_points() -> None:
    assert made([0.0, 1.0, 2.0, math.inf]).median == 1.5
    assert made([0.0, math.inf, math.inf]).median == math.inf
    assert made([0.0, 1.0, 2.0, math.inf]).quantile(0.75) == 2.0
    assert "never reached" in str(made([0.0, math.inf, math.inf]))


def test_gap_of_different_norms_is_refused() -> None:
    with pytest.raises(InputError, match="same norm"):
        made([1.0]).gap(made([1.0], "2"))
    with pytest.raises(InputError, match="Margins"):
        made([1.0]).gap([1.0])  # type: ignore[arg-type]


def test_stored_as_json_and_back() -> None:
    model, x = build("mlp", batch=10)
    found = margins(model, x, (model(x)[:, 0] > 0.5).long())
    again = Margins.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert str(again) == str(found)
    torch.testing.assert_close(again.values, found.values, rtol=0, atol=0)
    assert again.evidence == found.evidence
    assert torch.equal(again.suspect, found.suspect)
    censored = made([0.0, 0.3, math.inf])
    stored = json.loads(json.dumps(censored.to_dict(), allow_nan=False))
    assert torch.equal(Margins.from_dict(stored).values, censored.values)


def test_plot_draws_the_curve() -> None:
    import matplotlib

    matplotlib.use("Agg")
    ax = made([0.0, 0.1, 0.2, math.inf]).plot(label="four points")
    y = ax.lines[0].get_ydata()
    np.testing.assert_allclose(y[:5], [0.25, 0.25, 0.5, 0.75, 0.75])
    assert "misclassified" in ax.get_ylabel()
    assert made([math.inf]).plot(ax) is ax


def test_a_summary_says_what_a_user_needs() -> None:
    text = str(made([0.0, 0.1, math.inf]))
    for part in ("3 points", "median 0.1", "misclassified 1", "no adversarial example found 1", "not requested"):
        assert part in text
    doubtful = Margins(torch.ones(40), "inf", evidence=Evidence(40, 30, 0, 0, 1, 0, 40, 20, 0))
    assert not doubtful.trusted
    assert "not to be trusted" in str(doubtful)
    assert "30 of 40" in str(doubtful)
    assert str(Gap(0.25, 0.1, 0.4)) == "0.250 (95% interval 0.100 to 0.400)"


def test_one_distance_in_margins_reports_and_scipy() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.uniform(size=40).round(2), rng.uniform(0.2, 1.2, size=31).round(2)
    expected = ks_2samp(a, b).statistic
    assert abs(float(made(a.tolist()).gap(made(b.tolist()), resamples=1)) - expected) < 1e-12
    at, low, high = widest_gap(a, b)
    assert abs(high - low - expected) < 1e-12
    assert [low, high] == pytest.approx(sorted([(a <= at).mean(), (b <= at).mean()]), abs=1e-12)
    assert widest_gap(np.array([math.inf]), np.array([math.inf])) == (0.0, 0.0, 0.0)
