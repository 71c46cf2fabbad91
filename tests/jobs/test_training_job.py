"""One training and its measurement."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from excite.errors import RunError
from excite.jobs.progress import JobProgress
from excite.jobs.training_job import MarginMeasurement, NoMeasurement, TrainingJob
from excite.runs import load_run
from excite.train.config import parse_config
from jobs.sleep_jobs import settings


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    values = {key: value for key, value in settings().items() if key != "sweep"}
    return TrainingJob("plain", 0, tmp_path / "plain-0", parse_config(values), NoMeasurement())


def test_progress_grows_from_training_to_measurement(job: TrainingJob) -> None:
    messages: list[JobProgress] = []
    assert not job.trained()
    job.run(messages.append)
    fractions = [message.fraction for message in messages]
    assert fractions == sorted(fractions)
    assert list(dict.fromkeys(message.phase for message in messages)) == ["training", "measuring", "done"]
    assert {message.name for message in messages} == {"plain-0"}
    assert (messages[-1].status, messages[-1].fraction) == ("done", 1.0)
    assert job.trained()
    assert job.finished()


@pytest.mark.slow
def test_a_job_is_finished_once_its_points_are_measured(job: TrainingJob) -> None:
    job.run(lambda progress: None)
    few, more = (dataclasses.replace(job, measurement=MarginMeasurement(points, certify=False)) for points in (3, 5))
    assert few.trained()
    assert not few.finished()
    few.run(lambda progress: None)
    assert few.finished()
    assert not more.finished()
    with load_run(job.folder) as run:
        assert run.read_json("summary")["arm"] == "plain"


def test_another_config_and_a_damaged_run_are_not_finished(job: TrainingJob) -> None:
    job.run(lambda progress: None)
    other = dataclasses.replace(job, config=job.config.model_copy(update={"epochs": 4}))
    assert not other.finished()
    with pytest.raises(RunError, match="another config"):
        other.run(lambda progress: None)
    (job.folder / "run.json").write_text("{")
    assert not job.finished()
