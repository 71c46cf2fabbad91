"""Warnings on made-up series: unusual values, leads, false alarms."""

from __future__ import annotations

import math

import numpy as np

from excite.studies.beyond.spike_warnings import (
    calibrate,
    choose,
    loss_onset,
    unusualness,
)
from studies.planted_spikes import planted


def test_unusualness_is_that_of_a_slow_version() -> None:
    rng = np.random.default_rng(0)
    table = np.exp(rng.standard_normal((140, 3)) * [0.1, 0.5, 0.001])
    table[130, 0] = np.nan
    table[135:, 1] = np.inf
    found = unusualness(table)
    each = np.zeros(table.shape)
    for step in range(110, 140):
        for series in range(3):
            past = np.log(table[step - 110 : step - 10, series])
            deviation = max(1.4826 * np.median(np.abs(past - np.median(past))), 0.02)
            value = table[step, series]
            each[step, series] = (math.log(value) - np.median(past)) / deviation if np.isfinite(value) else math.inf
    expected = np.array([each[max(0, step - 2) : step + 1].min(0) if step > 1 else [0, 0, 0] for step in range(140)])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_loss_leaves_its_range_where_it_stays_above() -> None:
    losses = np.array([1.0, 5.0, 1.0, 3.0, 4.0, np.nan, 6.0])
    assert loss_onset(losses, 7, 2.0) == 4
    assert loss_onset(np.array([1.0, np.nan]), 2, None) == 2


def test_planted_warnings_are_found_with_their_leads() -> None:
    tuning = [planted(None, None, seed=s) for s in range(6)] + [planted(500 + s, 20, seed=s) for s in range(6)]
    thresholds = calibrate(tuning)
    assert all(2.9 < value < 3 for value in thresholds.values())  # the largest of windows of noise
    chosen = choose(tuning, thresholds)
    assert chosen == "update"
    assert planted(400, 33, seed=9).lead("update", thresholds["update"]) == 33
    assert math.isnan(planted(400, 60, seed=9).lead("update", 8.0))  # too early to count
    assert planted(400, 60, seed=9).false_alarms("update", 8.0) == 1
    assert planted(400, 33, seed=9).false_alarms("update", 8.0) == 0
    alarms = planted(None, None)
    alarms.statistics["update"][[200, 210, 300]] = 9.0  # type: ignore[index]
    assert alarms.false_alarms("update", 8.0) == 2  # those within 50 steps count once
