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

from engine_jobs import Job, jobs, settings
from excite.errors import InputError, RunError, TrainingStopped
from excite.jobs.executors import Workers
from excite.jobs.job import Tell
from excite.jobs.scheduler import Task, complete
from excite.jobs.sweep import plan, run_sweep
from excite.jobs.workspace import Place, StoredWork, find_place
from excite.runs import load_run
from excite.runs.lease import Lease
from excite.runs.store import Store, StoreError
from excite.train import from_config as training


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
    assert [row.found for row in here.rows] == [row.found for row in there.rows]
    names = Store(url).list()
    assert {"sweep.json", "tasks.json", "optimizer.lr-0.5-0/run.json"} <= names.keys()
    assert "lease.json" not in names
    for one in here.sweep.tasks:
        with load_run(one.folder) as a, load_run(f"{url}/{one.folder.name}") as b:
            assert a.series("loss/step")[1].tolist() == b.series("loss/step")[1].tolist()
            weights = [run.load_checkpoint()[1]["model"] for run in (a, b)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    monkeypatch.setattr(training, "train", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "another machine"))
    again = run_sweep(plan(settings(), url), workers=1)
    assert [row.found for row in again.rows] == [row.found for row in there.rows]
    status, out, err = excite("report", url, "--out", "report.html")
    assert status == 0, err
    assert "optimizer.lr-0.5-0" in out
    Path("sweep.json").write_text(json.dumps(settings()))
    status, out, err = excite("sweep", "sweep.json", "--workers", "1", "--out", url)
    assert status == 0, err
    assert "2 tasks: 2 done" in out
    assert f"results: {url}/sweep.json" in out


@dataclasses.dataclass(frozen=True)
class Killed(Task):
    """A slow training whose process is killed in the middle, once."""

    once: Path = Path()

    def perform(self, tell: Tell) -> None:
        def slow(name: str, phase: str, share: float) -> None:
            time.sleep(0.03)
            tell(name, phase, share)
            if share > 0.6 and not self.once.exists():
                self.once.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        super().perform(slow)


@pytest.mark.slow
def test_a_killed_worker_is_continued_on_another_disk_from_the_last_copied_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {**settings(over={"optimizer.lr": [0.5]}), "epochs": 12}
    local = plan(base, tmp_path / "here")
    run_sweep(local, workers=1)
    url = f"file://{tmp_path}/store"
    place = find_place(url)
    task = plan(base, url).tasks[0]
    killed = Killed(task.arm, task.seed, task.folder, task.config, task.measurement, once=tmp_path / "once")
    with pytest.raises(TrainingStopped, match=r"killed by signal 9 \(log: file://.*/logs/optimizer.lr-0.5-0.log\)"):
        complete([killed], 1, engine=Workers(1, retries=0), place=place)
    with load_run(f"{url}/{task.folder.name}") as run:
        copied = run.checkpoints()[-1].step
        assert run.status == "running"
        assert 0 < copied < 48
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "another machine"))
    complete([killed], 1, engine=Workers(1, retries=0), place=find_place(url))
    with load_run(local.tasks[0].folder) as a, load_run(f"{url}/{task.folder.name}") as b:
        assert b.status == "done"
        assert a.series("loss/step")[1].tolist() == b.series("loss/step")[1].tolist()
        weights = [run.load_checkpoint()[1]["model"] for run in (a, b)]
        database = b.path / "metrics.db"
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, time FROM metrics WHERE name = 'loss/step'").fetchall()
    death = float((tmp_path / "once").read_text())
    assert {step for step, written in rows if written < death} == set(range(1, copied + 1))
    assert not list((tmp_path / "another machine").rglob("work/*/metrics.db"))  # scratch folders are removed


def test_failing_work_has_its_log_in_the_store_and_store_errors_are_tried_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    place = find_place(url)
    todo = jobs(place.folder, "fine", "fails once", "fails always")
    with pytest.raises(TrainingStopped, match=r"fails-always-2: a failure that stays \(log: file://.*2\.log\)"):
        complete(todo, 2, engine=Workers(2, retries=1), place=place)
    log = (tmp_path / "store/logs/fails-always-2.log").read_text()
    assert log.count("RuntimeError: a failure that stays") == 2
    assert (tmp_path / "store/fine-0/done").exists()
    assert (tmp_path / "store/fails-once-1/done").exists()


def test_a_copy_that_fails_while_work_goes_on_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = find_place(memory())
    assert place.store is not None
    real, count = place.store.put, 0

    def failing(source: Path, name: str) -> None:
        nonlocal count
        count += 1
        if count == 1:
            raise StoreError("the network is gone for a moment")
        real(source, name)

    monkeypatch.setattr(place.store, "put", failing)
    work = StoredWork(Job("fine", 0, place.folder / "fine-0", seconds=0.7), place.store)
    work.perform(lambda *_: None)
    assert count > 1
    assert work.finished()
    monkeypatch.setattr(place.store, "put", lambda *_: (_ for _ in ()).throw(StoreError("gone")))
    work = StoredWork(Job("fine", 1, place.folder / "fine-1"), place.store)
    with pytest.raises(StoreError, match="gone"):  # what is not in the store is not done
        work.perform(lambda *_: None)
    assert not work.finished()


def test_memory_is_refused_for_worker_processes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="seen by this process only"):
        run_sweep(plan(settings(), memory()), engine=Workers(2))


def test_a_second_start_from_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/store"
    with Lease(Store(url)), pytest.raises(RunError, match="another process is writing to file://"):
        run_sweep(plan(settings(), url), workers=1)
    with find_place(url).held(), pytest.raises(RunError, match="another process is writing to file://"):
        run_sweep(plan(settings(), url), workers=1)


def test_plain_folders_are_used_as_they_are(tmp_path: Path) -> None:
    place = find_place(tmp_path / "out")
    assert place == Place(tmp_path / "out")
    todo = jobs(place.folder, "fine")
    assert place.works(todo) == todo


@pytest.mark.slow
def test_a_study_into_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from excite.studies import computed, run

    url = memory()
    here = run("linear-margin", "quick", seeds=1, out=tmp_path / "here", workers=1)
    there = run("linear-margin", "quick", seeds=1, out=url, workers=1)
    assert [n.plain() for n in here.numbers] == [n.plain() for n in there.numbers]
    assert {"results.md", "numbers.json", "figure.png", "figure.svg"} <= Store(url).list().keys()
    monkeypatch.setattr(computed.Computation, "perform", lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr(computed.JointComputation, "perform_with", lambda *_: pytest.fail("computed again"))
    run("linear-margin", "quick", seeds=1, out=url, workers=1)
