"""Worker processes: the work is done once, a killed one is replaced, what fails is reported with its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_jobs import Job, jobs, tries_of
from excite.errors import InputError, TrainingStopped
from excite.jobs.executors import Workers, find_engine
from excite.jobs.scheduler import complete


def quiet(name: str, phase: str, share: float) -> None:
    pass


@pytest.mark.slow
def test_killed_failing_and_refused_work_does_not_stop_the_rest(tmp_path: Path) -> None:
    todo = jobs(tmp_path, "fine", "killed once", "fails once", "fails always", "killed always", "refused", "fine")
    seen = []
    failures = Workers(2, retries=1).perform(todo, lambda *what: seen.append(what))
    assert {failure.task.arm for failure in failures} == {"fails always", "killed always", "refused"}
    assert [job.finished() for job in todo] == [True, True, True, False, False, False, True]
    assert [tries_of(job) for job in todo] == [1, 2, 2, 2, 2, 1, 1]  # a refusal is final
    words = {failure.task.arm: str(failure) for failure in failures}
    assert "killed by signal 9" in words["killed always"]
    assert "a failure that stays" in words["fails always"]
    assert "radius: expected a number" in words["refused"]
    log = next(failure.log for failure in failures if failure.task.arm == "fails always")
    assert log is not None
    text = Path(log).read_text()
    assert text.count("at work on fails always") == 2  # what it printed
    assert "RuntimeError: a failure that stays" in text  # and the traceback
    assert {name for name, _, share in seen if share == 1} == {job.folder.name for job in todo if job.finished()}


def test_complete_does_only_what_is_left_and_says_what_failed(tmp_path: Path) -> None:
    todo = jobs(tmp_path, "fine", "fails always")
    for _ in range(2):
        with pytest.raises(TrainingStopped, match=r"fails-always-1: .*log: .*fails-always-1\.log.*1 of 2 trainings"):
            complete(todo, 2, engine=Workers(2, retries=0))
    assert [tries_of(job) for job in todo] == [1, 2]


def test_work_that_does_not_pickle_is_refused_before_anything_starts(tmp_path: Path) -> None:
    class Local(Job):
        pass

    fine = Job("fine", 0, tmp_path / "fine-0")
    with pytest.raises(InputError, match="cannot be sent to another process"):
        Workers(2).perform([fine, Local("local", 1, tmp_path / "local-1")], quiet)
    assert not fine.folder.exists()


def test_an_interrupt_ends_the_workers_and_leaves_what_is_done(tmp_path: Path) -> None:
    todo = jobs(tmp_path, "fine", "fine", "fine", seconds=0.3)

    def stop(name: str, phase: str, share: float) -> None:
        if phase == "done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Workers(1).perform(todo, stop)
    assert [job.finished() for job in todo] == [True, False, False]
    complete(todo, 2, engine=Workers(2))
    assert all(job.finished() for job in todo)


@pytest.mark.parametrize("on", ["slurm", "local:4", ""])
def test_unknown_engines_are_refused(on: str) -> None:
    with pytest.raises(InputError, match="expected 'local', 'ray' or 'ray:ADDRESS'"):
        find_engine(on)
    assert find_engine(None) is None


def test_in_this_process_too_work_is_tried_again_as_often_as_said(tmp_path: Path) -> None:
    todo = jobs(tmp_path, "fails once", "fails always", "refused")
    with pytest.raises(TrainingStopped, match="1 of 3 trainings"):
        complete(todo, 1, retries=2)
    assert [tries_of(job) for job in todo] == [2, 3, 1]
