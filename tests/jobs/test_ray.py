"""A real Ray cluster of two nodes on this machine: a lost node, a killed worker, work that fails, bad input."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import excite
from engine_jobs import Job, jobs, tries_of
from excite.errors import InputError, RunError, TrainingStopped
from excite.jobs.executors import find_engine
from excite.jobs.ray import OnRay
from excite.jobs.scheduler import complete
from excite.jobs.sweep import plan, run_sweep
from excite.runs import load_run

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'excite[ray]'")


def quiet(name: str, phase: str, share: float) -> None:
    pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    tests = str(Path(__file__).parent.parent)
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, before["PYTHONPATH"]]))
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield started
    finally:
        ray.shutdown()
        started.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def test_killed_failing_and_refused_work_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    todo = jobs(tmp_path, "fine", "killed once", "fails once", "fails always", "refused")
    engine = find_engine(f"ray:{cluster.address}", retries=1)
    assert engine is not None
    seen: list[tuple[str, str, float]] = []
    failures = engine.perform(todo, lambda *what: seen.append(what))
    assert {failure.task.arm for failure in failures} == {"fails always", "refused"}
    assert [job.finished() for job in todo] == [True, True, True, False, False]
    assert [tries_of(job) for job in todo] == [1, 2, 2, 2, 1]
    assert "a failure that stays" in next(str(f) for f in failures if f.task.arm == "fails always")
    assert seen


def test_a_node_that_is_lost_in_the_middle(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    todo = jobs(tmp_path, *["fine"] * 6, seconds=1.0)
    engine = find_engine(f"ray:{cluster.address}", retries=2)
    assert engine is not None

    def lose() -> None:
        deadline = time.monotonic() + 60
        while sum(job.folder.exists() for job in todo) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=lose)
    killer.start()
    failures = engine.perform(todo, quiet)
    killer.join()
    assert failures == []
    assert all(job.finished() for job in todo)


def test_what_is_wrong_is_said_before_anything_is_scheduled(cluster: Any, tmp_path: Path) -> None:
    todo = jobs(tmp_path, "fine")
    for engine, words in (
        (find_engine("ray:127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
        (
            find_engine(f"ray:{cluster.address}", gpus=64),
            "gpus-per-task 64: no node of the cluster has more than 0 GPUs",
        ),
    ):
        assert engine is not None
        with pytest.raises(InputError, match=words):
            engine.perform(todo, quiet)
    assert not todo[0].folder.exists()


def test_another_excite_on_a_node_is_refused(cluster: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(excite.__file__).parent, other / "excite", ignore=shutil.ignore_patterns("__pycache__"))
    (other / "excite" / "_version.py").write_text('__version__ = "0.0.1"\n')
    path = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(other), path])
    try:
        node = cluster.add_node(num_cpus=1)
    finally:
        os.environ["PYTHONPATH"] = path
    cluster.wait_for_nodes()
    todo = jobs(tmp_path / "runs", "fine")
    engine = find_engine(f"ray:{cluster.address}")
    assert engine is not None
    try:
        with pytest.raises(InputError, match=r"node .* has Python .* and Excite 0\.0\.1; here are"):
            engine.perform(todo, quiet)
    finally:
        cluster.remove_node(node)
    assert not todo[0].folder.exists()


def test_work_that_does_not_pickle_is_refused(cluster: Any, tmp_path: Path) -> None:
    class Local(Job):
        pass

    engine = find_engine(f"ray:{cluster.address}")
    assert engine is not None
    with pytest.raises(InputError, match="cannot be sent to another process"):
        engine.perform([Local("local", 1, tmp_path / "local-1")], quiet)


def settings(**more: Any) -> dict[str, Any]:
    return {
        "data": {"name": "moons", "train": 40, "test": 40},
        "model": {"name": "mlp", "options": {"widths": [8]}},
        "optimizer": {"name": "sgd", "lr": 0.5},
        "epochs": 3, "batch": 10, "watch": False,
        "sweep": {"over": {"optimizer.lr": [0.001, 0.5]}, "metric": "accuracy/test"}, **more,
    }  # fmt: skip


def test_the_same_bits_as_in_this_process_and_a_second_start_is_refused(cluster: Any, tmp_path: Path) -> None:
    here, there = (plan(settings(), tmp_path / name) for name in ("here", "there"))
    run_sweep(here, workers=1)
    engine = find_engine(f"ray:{cluster.address}")
    refused: list[str] = []

    def second(tally: Any) -> None:
        if not refused:
            with pytest.raises(RunError, match="another process is writing to") as error:
                run_sweep(there, engine=engine)
            refused.append(str(error.value))

    result = run_sweep(there, engine=engine, show=second)
    assert result.failed is None
    assert refused
    for one, two in zip(here.tasks, there.tasks):
        with load_run(one.folder) as a, load_run(two.folder) as b:
            assert a.series("loss/step")[1].tolist() == b.series("loss/step")[1].tolist()
            weights = [run.load_checkpoint()[1]["model"] for run in (a, b)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_store_and_a_lost_node(cluster: Any, tmp_path: Path) -> None:
    from excite.jobs.workspace import find_place

    url = f"file://{tmp_path}/store"
    place = find_place(url)
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    todo = jobs(place.folder, *["fine"] * 5, "fails always", seconds=1.0)
    lost = threading.Event()

    def lose(tally: Any) -> None:
        if tally.count("done") >= 1 and not lost.is_set():
            lost.set()
            cluster.remove_node(node, allow_graceful=False)

    with pytest.raises(TrainingStopped, match=r"fails-always-5: .* \(log: file://.*; 5 of 6"):
        complete(todo, 2, engine=find_engine(f"ray:{cluster.address}", retries=2), place=place, show=lose)
    assert lost.is_set()
    log = (tmp_path / "store/logs/fails-always-5.log").read_text()
    assert log.count("RuntimeError: a failure that stays") == 3  # of every try, on whichever node
    todo.pop()
    assert all((tmp_path / "store" / job.folder.name / "done").exists() for job in todo)
    assert all(work.finished() for work in place.works(todo))


def test_messages_that_get_lost_do_not_stop_the_work(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OnRay._board

    def killed(self: OnRay, ray: Any) -> Any:
        board = real(self, ray)
        ray.kill(board)
        return board

    monkeypatch.setattr(OnRay, "_board", killed)
    todo = jobs(tmp_path, "fine", "fine", seconds=0.3)
    engine = find_engine(f"ray:{cluster.address}")
    assert engine is not None
    assert engine.perform(todo, quiet) == []
    assert all(job.finished() for job in todo)
