"""Margin curves, quantiles, summaries and how margins are stored."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from excite.errors import InputError
from excite.margin import Evidence, Gap, Margins, margins
from models import build


def made(values: list[float], norm: str = "inf") -> Margins:
    return Margins(torch.tensor(values, dtype=torch.float64), norm)  # type: ignore[arg-type]


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


def test_band_covers_the_fraction_it_is_a_sample_of():
    rng = np.random.default_rng(0)
    truth, covered = 0.3, 0
    for _ in range(400):  # margins uniform on (0, 1): the fraction within 0.3 is 0.3
        low, high = Margins(torch.from_numpy(rng.random(60)), "inf").band(truth)
        covered += low <= truth <= high
    assert covered >= 400 * 0.95 - 4 * (400 * 0.95 * 0.05) ** 0.5  # at least 95 %, minus four standard deviations
    m = Margins(torch.tensor([0.0, 0.5, math.inf]), "inf")
    low, high = m.band([0.0, 0.5, 2.0])
    assert (low <= m.within([0.0, 0.5, 2.0])).all()
    assert (high >= m.within([0.0, 0.5, 2.0])).all()
    # Clopper–Pearson of 0 and of n of n has the closed form 1 − (α/2)^(1/n)
    none, every = Margins(torch.ones(10), "inf"), Margins(torch.zeros(10), "inf")
    assert none.band(0.5) == pytest.approx((0, 1 - 0.025**0.1))
    assert every.band(0.5) == pytest.approx((0.025**0.1, 1))
    with pytest.raises(InputError):
        m.band(-1.0)


def test_the_band_is_drawn_if_asked_for():
    m = Margins(torch.rand(20, dtype=torch.float64), "inf")
    without, drawn = m.plot(), m.plot(level=0.95)
    assert len(drawn.collections) == len(without.collections) + 1
