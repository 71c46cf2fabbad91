"""What runs achieved: medians with intervals, gaps, and whether the loss diverged."""

import math

import numpy as np
import pytest
from scipy.stats import ks_2samp, kstwobign

from excite.margin.gap import chance_gap
from excite.report.verdict.outcome import (
    displayed_status,
    divergence,
    from_latest,
    from_margins,
    median_of,
)
from excite.runs.reader import Overview

from .planted import both


def test_gap_and_chance_are_those_of_the_two_sample_test():
    margins = both(0.05, 0.045)
    found = from_margins(margins)
    statistic = ks_2samp(*(np.asarray(margins[part].values) for part in ("train", "test"))).statistic
    assert found.gap.value == pytest.approx(statistic)
    assert chance_gap(500, 300) == pytest.approx(kstwobign.isf(0.05) * math.sqrt(1 / 500 + 1 / 300), rel=1e-3)
    _, train, test = found.widest
    assert abs(train - test) == pytest.approx(statistic)
    assert found.accuracy == {"train": 0.92, "test": 0.92}


def test_the_interval_of_a_median_covers_it_in_95_percent():
    rng = np.random.default_rng(0)
    for n in (20, 101, 500):
        found = [median_of([rng.exponential(1.0, n)]) for _ in range(1000)]
        held = np.mean([one.low <= math.log(2) <= one.high for one in found])
        assert held >= 0.94
        assert np.median([one.high - one.low for one in found]) < 6 / math.sqrt(n)


def test_medians_of_few_points_or_never_reached_have_no_end():
    assert math.isinf(median_of([np.array([0.1, 0.2])]).high)
    assert math.isinf(median_of([np.array([0.1, *[math.inf] * 9])]).value)
    assert math.isinf(median_of([np.array([0.1, *[math.inf] * 9])]).error)


def test_last_values_of_metrics():
    found = from_latest({"margin_gap/median/test": 0.1, "margin_gap/gap": math.nan, "margin_gap/chance": 0.2})
    assert found.margin == 0.1
    assert found.gap is None
    assert not found.final
    assert from_latest({}).medians == {}


NAN, FALLS = math.nan, tuple(np.linspace(2.3, 0.1, 20))


@pytest.mark.parametrize(
    ("first", "last", "running", "found"),
    [
        ((), (), False, ""),
        (FALLS, FALLS, False, ""),
        (FALLS, (*FALLS[1:], NAN), False, "the loss is not a finite number"),
        (FALLS, (*FALLS[1:], math.inf), True, ""),  # mixed precision skips such steps
        (FALLS, (*FALLS[3:], NAN, NAN, NAN), True, "the loss is not a finite number"),
        (FALLS, (NAN, *FALLS[1:]), False, ""),
        ((NAN,), (NAN,), True, "the loss is not a finite number"),
        ((2.0,) * 20, (200.0,) * 20, False, "the loss rose from 2 to 200"),
        ((2.0,) * 20, (15.0,) * 20, False, ""),
        ((-2.0,) * 20, (200.0,) * 20, False, ""),  # no scale
        ((2.3, *(1e6,) * 19), (1e6, *(2e6,) * 19), False, "the loss rose from 2.3 to 2e+06"),  # at the second step
        ((0.001, *(1.0,) * 19), (0.05, *(1.0,) * 19), False, ""),  # a first batch that happens to be easy
        ((2.0, 2.0, 50.0, 90.0, 300.0, 900.0, 900.0, 900.0),) * 2 + (False, "the loss rose from 2 to 900"),
        ((2.3, 2e6, *[160.0] * 18), (150.0,) * 20, False, "the loss rose from 2.3 to 150"),
        ((2.3, 2e4, *[160.0] * 18), (150.0,) * 20, False, "the loss rose from 2.3 to 150"),
        ((2.3, 2e4, *[20.0] * 18), (15.0,) * 20, False, ""),  # recovers
        (
            (2.3, 5.4, 634.0, 3800.0, 3.9e5, *[30.0] * 15),
            (38.0, 18.0, *[46.0] * 18),
            False,
            "the loss rose from 2.3 to 46",
        ),
        ((2.3, 2e6, 900.0, *[150.0] * 5),) * 2 + (False, "the loss rose from 2.3 to 150"),  # eight steps
        ((2.3, 2e6, 900.0, *[150.0] * 17), (2e6, 900.0, *[150.0] * 18), False, "the loss rose from 2.3 to 150"),  # 21
        ((2.3, *[900.0] * 19), (150.0,) * 20, False, ""),  # no peak: a first batch that happens to be easy
        (tuple(np.geomspace(1e-8, 1e-3, 20)), (0.4,) * 20, False, ""),  # a student that starts as its teacher
        ((1e-4,) * 20, (0.9,) * 20, False, ""),  # rewards that come late
        ((1e-4,) * 20, (40.0,) * 20, False, "the loss rose from 0.0001 to 40"),
        ((3e9,) * 20, (2e9,) * 20, False, ""),  # a regression in units of its own
        ((3e9,) * 20, (5e10,) * 20, False, "the loss rose from 3e+09 to 5e+10"),
        ((0.01, *[1.0] * 19), (0.5,) * 20, False, ""),
    ],
)
def test_when_a_training_has_diverged(first, last, running, found):
    assert divergence(first, last, running) == found


def test_losses_of_single_samples_vary_and_do_not_diverge():
    rng = np.random.default_rng(0)
    for batch, level, allowed in ((1, 1, 3), (8, 2, 0), (32, 1, 0)):
        found = [
            divergence(*(tuple(1000 * by * (rng.standard_normal((20, batch)) ** 2).mean(1)) for by in (1, level)))
            for _ in range(500)
        ]
        assert sum(map(bool, found)) <= allowed


def test_diverged_replaces_every_other_status():
    broken = Overview(loss_first=FALLS, loss_last=(NAN,), broken_at=901)
    assert displayed_status("done", None, broken) == ("diverged", "the loss is not a finite number since step 901")
    assert displayed_status("failed", "why", Overview(loss_first=FALLS, loss_last=FALLS)) == ("failed", "why")


@pytest.mark.parametrize(("margin", "diverged"), [(0.0, True), (0.02, False), (None, False)])
def test_an_easy_first_batch_is_told_apart_by_the_margin(margin, diverged):
    first, last = (2.3, *[900.0] * 19), (150.0,) * 20
    assert divergence(first, last, margin=margin) == ("the loss rose from 2.3 to 150" if diverged else "")
    latest = {} if margin is None else {"margin_gap/median/test": margin}
    found, _ = displayed_status("done", None, Overview(loss_first=first, loss_last=last, latest=latest))
    assert found == ("diverged" if diverged else "done")
    assert divergence((2.3,) * 20, (2.4,) * 20, margin=0.0) == ""  # it does not learn, which is another finding
