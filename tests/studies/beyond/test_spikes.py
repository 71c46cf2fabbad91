"""Study `spikes`: its statistic against a slow version, planted warnings, and the whole path at a size for tests."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from excite.studies.beyond import spikes
from excite.studies.beyond.spikes import (
    ANY,
    LOSS,
    QUANTITIES,
    SpikeRun,
    calibrate,
    choose,
    loss_onset,
    summary,
    unusualness,
)
from excite.studies.study import VariantResult
from studies.small import run_tiny


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


def planted(onset: int | None, lead: int | None, name: str = "update", steps: int = 700, seed: int = 0) -> SpikeRun:
    """Noise below 3, and a value of 9 `lead` steps before the loss leaves its range."""
    rng = np.random.default_rng([seed, onset or 0])
    statistics = {key: 3 * rng.random(steps) for key in (*QUANTITIES, ANY, LOSS)}
    if onset is not None and lead is not None:
        statistics[name][onset - 1 - lead] = 9.0
    return SpikeRun(statistics, onset)


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


def test_numbers_are_of_runs_that_were_not_tuned_on() -> None:
    def detail(run: SpikeRun) -> dict[str, object]:
        return {"onset": run.onset, "statistics": {name: list(series) for name, series in run.statistics.items()}}

    runs = [planted(500, 20 if seed % 2 == 0 or seed < 4 else None, seed=seed) for seed in range(8)]
    numbers = [VariantResult("plain", seed, {"spiked": 1.0}) for seed in range(8)]
    judged = spikes.combine(numbers, {"plain": [detail(run) for run in runs]})
    assert [one.held_out for one in judged] == [0.0, 1.0] * 4
    hit, low, high = summary(judged)["hit"]
    assert hit == 0.5  # seeds 1 and 3 of 1, 3, 5 and 7
    assert 0 <= low < hit < high <= 1
    assert summary(judged)["lead"][0] == 20


def test_rates_are_the_same_for_both_variants_and_within_range() -> None:
    rates = [spikes.last_rate((1e-3, 0.01, 1.0), seed) for seed in range(50)]
    assert 0.01 <= min(rates) < 0.03
    assert 0.3 < max(rates) <= 1.0
    assert rates[3] == spikes.last_rate((1e-3, 0.01, 1.0), 3)


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"width": 16, "depth": 1, "heads": 2, "context": 16}
    tiny = dataclasses.replace(
        spikes.SCALES["quick"], seeds=3, steps=130, batch=8, model=model, rates=(3e-3, 3.0, 30.0), words="tiny"
    )
    result = run_tiny("spikes", tiny, tmp_path, monkeypatch)
    assert any(found.spiked for found in result.numbers)
