"""Study `spikes`: its statistic against a slow version, planted warnings, and the whole path at a size for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from excite.studies.beyond import spikes
from excite.studies.beyond.spike_warnings import (
    SpikeRun,
)
from excite.studies.beyond.spikes import summary
from excite.studies.study import VariantResult
from studies.planted_spikes import planted
from studies.small import run_tiny


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
