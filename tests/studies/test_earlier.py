"""Numbers of earlier runs: taken over where settings are the same, and only there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from excite import studies
from excite.errors import InputError
from excite.studies import runner
from excite.studies.beyond import robust_overfitting
from excite.studies.beyond.robust_overfitting import PGD, SCALES, STUDY, every
from excite.studies.earlier import fingerprint, take_earlier
from excite.studies.find import find_study
from excite.studies.runner import OutOfTime, plan_jobs
from excite.studies.study import Study, VariantResult

VALUES = {
    "test_best": 0.4, "test_last": 0.3, "train_last": 0.8, "gap_last": 0.5, "clean_last": 0.6, "strong_last": 0.3,
    "strong_train": 0.8, "minutes": 1.0,
}  # fmt: skip


def stored(folder: Path, seeds: int = 2, scale: str = "quick", **changes: object) -> Path:
    """A numbers.json with made-up numbers of every variant."""
    jobs = plan_jobs(STUDY, SCALES[scale], seeds, folder, "cpu")
    curves = {"train": [0.1, 0.8], "test": [0.1, 0.3]}
    numbers = [
        {**VariantResult(job.variant, job.seed, VALUES, curves=curves, settings=fingerprint(job)).plain(), **changes}
        for job in jobs
    ]
    file = folder / "earlier.json"
    content = {"study": STUDY.name, "scale": scale, "numbers": numbers, "verdicts": [], "versions": {"torch": "1.0"}}
    file.write_text(json.dumps(content))
    return file


def jobs_of(folder: Path, **changes: object) -> list:
    return plan_jobs(STUDY, replace(SCALES["quick"], **changes), 2, folder, "cpu")


def test_fingerprint_changes_with_settings_only(tmp_path: Path):
    first, other = jobs_of(tmp_path)[:2]
    assert fingerprint(first) == fingerprint(jobs_of(tmp_path / "elsewhere")[0])
    elsewhere = replace(first, config=first.config.model_copy(update={"device": "cuda"}))
    assert fingerprint(elsewhere) == fingerprint(first)
    assert len({fingerprint(job) for job in (first, other, *(jobs_of(tmp_path, **c)[0] for c in CHANGES))}) == 5


CHANGES = ({"epochs": 7}, {"points": 9}, {"radius": 0.5})


def test_same_settings_are_taken_over(tmp_path: Path):
    jobs = jobs_of(tmp_path)
    found = take_earlier(STUDY, "quick", jobs, stored(tmp_path))
    assert found.results.keys() == {(job.variant, job.seed) for job in jobs}
    assert found.of(jobs[0]).curves == {"train": [0.1, 0.8], "test": [0.1, 0.3]}
    assert found.versions == {"torch": "1.0"}


@pytest.mark.parametrize("change", CHANGES)
def test_other_settings_are_not(tmp_path: Path, change: dict[str, object]):
    found = take_earlier(STUDY, "quick", jobs_of(tmp_path, **change), stored(tmp_path))
    assert not found.results
    assert not found.versions


def test_numbers_without_settings_are_not(tmp_path: Path):
    assert not take_earlier(STUDY, "quick", jobs_of(tmp_path), stored(tmp_path, settings="")).results


def test_other_scales_studies_and_figures_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="scale 'short'"):
        take_earlier(STUDY, "quick", [], stored(tmp_path, scale="short"))
    with pytest.raises(InputError, match="drawn from its run folders"):
        take_earlier(find_study("margin-layers"), "quick", [], stored(tmp_path))
    other = Study("other", "", "", "", STUDY.method, SCALES, STUDY.variants, STUDY.claims)
    with pytest.raises(InputError, match="numbers of 'robust-overfitting'"):
        take_earlier(other, "quick", [], stored(tmp_path))


@pytest.mark.slow
def test_a_study_of_earlier_numbers_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "run_jobs", lambda jobs, *_, **__: None if not jobs else pytest.fail(str(jobs)))
    result = studies.run("robust-overfitting", seeds=2, numbers=stored(tmp_path), docs="pages")
    assert {(found.variant, found.seed) for found in result.numbers} >= {(PGD, 0), (every(SCALES["quick"].rho[0]), 1)}
    page = Path("pages/robust-overfitting.md").read_text()
    assert "training runs were not repeated: their numbers are those of an earlier run with the same settings." in page
    assert "torch 1.0" in page
    again = take_earlier(STUDY, "quick", jobs_of(tmp_path), "pages/robust-overfitting.json")
    assert len(again.results) == len(result.numbers)


@pytest.mark.slow
def test_missing_seeds_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutOfTime) as stop:
        studies.run("robust-overfitting", seeds=2, seconds=0, numbers=stored(tmp_path, seeds=1))
    assert len(stop.value.states) == len(robust_overfitting.variants(SCALES["quick"]))
    written = json.loads(Path("runs/studies/robust-overfitting-quick/numbers.json").read_text())
    assert len(written["numbers"]) == len(written["missing"]) == len(written["earlier"])
