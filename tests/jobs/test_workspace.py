"""Sweeps and studies over a store: nothing is trained twice, a killed worker is continued elsewhere, the same bits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from excite.errors import InputError, RunError, TrainingStopped
from excite.jobs.executors import ProcessExecutor
from excite.jobs.progress import JobProgress, ProgressCallback
from excite.jobs.scheduler import run_jobs
from excite.jobs.sweep import plan, run_sweep
from excite.jobs.training_job import TrainingJob
from excite.jobs.workspace import StoredJob, Workspace, find_workspace
from excite.runs import load_run
from excite.runs.lease import Lease
from excite.runs.store import Store, StoreError
from excite.train import from_config as training
from jobs.sleep_jobs import SleepJob, jobs, settings


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "scratch"))
    yield
    fsspec.filesystem("memory").store.clear()


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}/sweep"


def test_a_sweep_into_a_store_is_the_sweep_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excite: Any
) -> None:
    url = memory()
    here = run_sweep(plan(settings(), tmp_path / "here"), workers=1)
    there = run_sweep(plan(settings(), url), workers=1)
    assert [row.scores for row in here.rows] == [row.scores for row in there.rows]
    names = Store(url).list()
    assert {"sweep.json", "tasks.json", "optimizer.lr-0.5-0/run.json"} <= names.keys()
    assert "lease.json" not in names
    for one in here.sweep.jobs:
        with load_run(one.folder) as a, load_run(f"{url}/{one.folder.name}") as b:
            assert a.series("loss/step")[1].tolist() == b.series("loss/step")[1].tolist()
            weights = [run.load_checkpoint()[1]["model"] for run in (a, b)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    monkeypatch.setattr(training, "train", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "another machine"))
    again = run_sweep(plan(settings(), url), workers=1)
    assert [row.scores for row in again.rows] == [row.scores for row in there.rows]
    status, out, err = excite("report", url, "--out", "report.html")
    assert status == 0, err
    assert "optimizer.lr-0.5-0" in out
    Path("sweep.json").write_text(json.dumps(settings()))
    status, out, err = excite("sweep", "sweep.json", "--workers", "1", "--out", url)
    assert status == 0, err
    assert "2 jobs: 2 done" in out
    assert f"results: {url}/sweep.json" in out


@dataclasses.dataclass(frozen=True)
class Killed(TrainingJob):
    """A slow training whose process is killed in the middle, once."""

    once: Path = Path()

    def run(self, on_progress: ProgressCallback) -> None:
        def slow(progress: JobProgress) -> None:
            time.sleep(0.03)
            on_progress(progress)
            if progress.fraction > 0.6 and not self.once.exists():
                self.once.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        super().run(slow)


@pytest.mark.slow
def test_a_killed_worker_is_continued_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {**settings(over={"optimizer.lr": [0.5]}), "epochs": 12}
    local = plan(base, tmp_path / "here")
    run_sweep(local, workers=1)
    url = f"file://{tmp_path}/store"
    workspace = find_workspace(url)
    job = plan(base, url).jobs[0]
    killed = Killed(job.variant, job.seed, job.folder, job.config, job.measurement, once=tmp_path / "once")
    with pytest.raises(TrainingStopped, match=r"killed by signal 9 \(log: file://.*/logs/optimizer.lr-0.5-0.log\)"):
        run_jobs([killed], 1, executor=ProcessExecutor(1, retries=0), workspace=workspace)
    with load_run(f"{url}/{job.folder.name}") as run:
        copied = run.checkpoints()[-1].step
        assert run.status == "running"
        assert 0 < copied < 48
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "another machine"))
    run_jobs([killed], 1, executor=ProcessExecutor(1, retries=0), workspace=find_workspace(url))
    with load_run(local.jobs[0].folder) as a, load_run(f"{url}/{job.folder.name}") as b:
        assert b.status == "done"
        assert a.series("loss/step")[1].tolist() == b.series("loss/step")[1].tolist()
        weights = [run.load_checkpoint()[1]["model"] for run in (a, b)]
        database = b.path / "metrics.db"
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, time FROM metrics WHERE name = 'loss/step'").fetchall()
    death = float((tmp_path / "once").read_text())
    assert {step for step, written in rows if written < death} == set(range(1, copied + 1))
    assert not list((tmp_path / "another machine").rglob("job/*/metrics.db"))  # scratch folders are removed


def test_logs_of_failed_jobs_are_in_the_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    workspace = find_workspace(url)
    all_jobs = jobs(workspace.folder, "fine", "fails once", "fails always")
    with pytest.raises(TrainingStopped, match=r"fails-always-2: a failure that stays \(log: file://.*2\.log\)"):
        run_jobs(all_jobs, 2, executor=ProcessExecutor(2, retries=1), workspace=workspace)
    log = (tmp_path / "store/logs/fails-always-2.log").read_text()
    assert log.count("RuntimeError: a failure that stays") == 2
    assert (tmp_path / "store/fine-0/done").exists()
    assert (tmp_path / "store/fails-once-1/done").exists()


@pytest.mark.slow
def test_an_upload_that_fails_does_not_stop_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = find_workspace(memory())
    assert workspace.store is not None
    real, count = workspace.store.put, 0

    def failing(source: Path, name: str) -> None:
        nonlocal count
        count += 1
        if count == 1:
            raise StoreError("the network is gone for a moment")
        real(source, name)

    monkeypatch.setattr(workspace.store, "put", failing)
    job = StoredJob(SleepJob("fine", 0, workspace.folder / "fine-0", seconds=0.7), workspace.store)
    job.run(lambda *_: None)
    assert count > 1
    assert job.finished()
    monkeypatch.setattr(workspace.store, "put", lambda *_: (_ for _ in ()).throw(StoreError("gone")))
    job = StoredJob(SleepJob("fine", 1, workspace.folder / "fine-1"), workspace.store)
    with pytest.raises(StoreError, match="gone"):  # what is not in the store is not done
        job.run(lambda *_: None)
    assert not job.finished()


def test_memory_is_refused_for_worker_processes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="visible to this process only"):
        run_sweep(plan(settings(), memory()), executor=ProcessExecutor(2))


def test_a_second_start_from_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/store"
    with Lease(Store(url)), pytest.raises(RunError, match="another process is writing to file://"):
        run_sweep(plan(settings(), url), workers=1)
    with find_workspace(url).lock(), pytest.raises(RunError, match="another process is writing to file://"):
        run_sweep(plan(settings(), url), workers=1)


def test_plain_folders_are_used_as_they_are(tmp_path: Path) -> None:
    workspace = find_workspace(tmp_path / "out")
    assert workspace == Workspace(tmp_path / "out")
    all_jobs = jobs(workspace.folder, "fine")
    assert workspace.bind(all_jobs) == all_jobs


@pytest.mark.slow
def test_a_study_into_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from excite.studies import computed, run

    url = memory()
    here = run("linear-margin", "quick", seeds=1, out=tmp_path / "here", workers=1)
    there = run("linear-margin", "quick", seeds=1, out=url, workers=1)
    assert [n.plain() for n in here.numbers] == [n.plain() for n in there.numbers]
    assert {"results.md", "numbers.json", "figure.png", "figure.svg"} <= Store(url).list().keys()
    monkeypatch.setattr(computed.Computation, "run", lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr(computed.JointComputation, "run_jointly", lambda *_: pytest.fail("computed again"))
    run("linear-margin", "quick", seeds=1, out=url, workers=1)
