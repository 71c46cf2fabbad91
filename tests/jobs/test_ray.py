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
from excite.errors import InputError, RunError, TrainingStopped
from excite.jobs.executors import find_executor
from excite.jobs.progress import JobProgress, ProgressTracker, with_tracker
from excite.jobs.ray import RayExecutor
from excite.jobs.scheduler import run_jobs
from excite.jobs.sweep import plan, run_sweep
from excite.runs import load_run
from jobs.sleep_jobs import SleepJob, jobs, tries_of

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'excite[ray]'")


def quiet(progress: JobProgress) -> None:
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
    all_jobs = jobs(tmp_path, "fine", "killed once", "fails once", "fails always", "refused")
    executor = find_executor(f"ray:{cluster.address}", retries=1)
    assert executor is not None
    messages: list[JobProgress] = []
    failures = executor.run(all_jobs, messages.append)
    assert {failure.job.variant for failure in failures} == {"fails always", "refused"}
    assert [job.finished() for job in all_jobs] == [True, True, True, False, False]
    assert [tries_of(job) for job in all_jobs] == [1, 2, 2, 2, 1]
    assert "a failure that stays" in next(str(f) for f in failures if f.job.variant == "fails always")
    assert messages


def test_a_node_that_is_lost_in_the_middle(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    all_jobs = jobs(tmp_path, *["fine"] * 6, seconds=1.0)
    executor = find_executor(f"ray:{cluster.address}", retries=2)
    assert executor is not None

    def lose() -> None:
        deadline = time.monotonic() + 60
        while sum(job.folder.exists() for job in all_jobs) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=lose)
    killer.start()
    failures = executor.run(all_jobs, quiet)
    killer.join()
    assert failures == []
    assert all(job.finished() for job in all_jobs)


def test_what_is_wrong_is_said_before_anything_is_scheduled(cluster: Any, tmp_path: Path) -> None:
    all_jobs = jobs(tmp_path, "fine")
    for executor, words in (
        (find_executor("ray:127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
        (
            find_executor(f"ray:{cluster.address}", gpus=64),
            "gpus-per-job 64: no node of the cluster has more than 0 GPUs",
        ),
    ):
        assert executor is not None
        with pytest.raises(InputError, match=words):
            executor.run(all_jobs, quiet)
    assert not all_jobs[0].folder.exists()


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
    all_jobs = jobs(tmp_path / "runs", "fine")
    executor = find_executor(f"ray:{cluster.address}")
    assert executor is not None
    try:
        with pytest.raises(InputError, match=r"node .* has Python .* and Excite 0\.0\.1, this machine"):
            executor.run(all_jobs, quiet)
    finally:
        cluster.remove_node(node)
    assert not all_jobs[0].folder.exists()


def test_work_that_does_not_pickle_is_refused(cluster: Any, tmp_path: Path) -> None:
    class Local(SleepJob):
        pass

    executor = find_executor(f"ray:{cluster.address}")
    assert executor is not None
    with pytest.raises(InputError, match="cannot be sent to another process"):
        executor.run([Local("local", 1, tmp_path / "local-1")], quiet)


def settings(**more: Any) -> dict[str, Any]:
    return {
        "data": {"name": "moons", "train": 40, "test": 40},
        "model": {"name": "mlp", "options": {"widths": [8]}},
        "optimizer": {"name": "sgd", "lr": 0.5},
        "epochs": 3, "batch": 10, "watch": False,
        "sweep": {"over": {"optimizer.lr": [0.001, 0.5]}, "metric": "accuracy/test"}, **more,
    }  # fmt: skip


def test_the_same_bits_and_a_second_start_is_refused(cluster: Any, tmp_path: Path) -> None:
    here, there = (plan(settings(), tmp_path / name) for name in ("here", "there"))
    run_sweep(here, workers=1)
    executor = find_executor(f"ray:{cluster.address}")
    refused: list[str] = []

    def second(progress: JobProgress) -> None:
        if not refused:
            with pytest.raises(RunError, match="another process is writing to") as error:
                run_sweep(there, executor=executor)
            refused.append(str(error.value))

    result = run_sweep(there, on_progress=second, executor=executor)
    assert result.failed is None
    assert refused
    for one, two in zip(here.jobs, there.jobs):
        with load_run(one.folder) as a, load_run(two.folder) as b:
            assert a.series("loss/step")[1].tolist() == b.series("loss/step")[1].tolist()
            weights = [run.load_checkpoint()[1]["model"] for run in (a, b)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_store_and_a_lost_node(cluster: Any, tmp_path: Path) -> None:
    from excite.jobs.workspace import find_workspace

    url = f"file://{tmp_path}/store"
    workspace = find_workspace(url)
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    all_jobs = jobs(workspace.folder, *["fine"] * 5, "fails always", seconds=1.0)
    lost = threading.Event()

    def lose(tracker: ProgressTracker) -> None:
        if tracker.count("done") >= 1 and not lost.is_set():
            lost.set()
            cluster.remove_node(node, allow_graceful=False)

    with pytest.raises(TrainingStopped, match=r"fails-always-5: .* \(log: file://.*; 5 of 6"):
        run_jobs(
            all_jobs,
            2,
            executor=find_executor(f"ray:{cluster.address}", retries=2),
            workspace=workspace,
            on_progress=with_tracker(lose),
        )
    assert lost.is_set()
    log = (tmp_path / "store/logs/fails-always-5.log").read_text()
    assert log.count("RuntimeError: a failure that stays") == 3  # of every try, on whichever node
    all_jobs.pop()
    assert all((tmp_path / "store" / job.folder.name / "done").exists() for job in all_jobs)
    assert all(job.finished() for job in workspace.bind(all_jobs))


def test_messages_that_get_lost_do_not_stop_the_work(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RayExecutor._start_actor

    def killed(self: RayExecutor, ray: Any) -> Any:
        actor = real(self, ray)
        ray.kill(actor)
        return actor

    monkeypatch.setattr(RayExecutor, "_start_actor", killed)
    all_jobs = jobs(tmp_path, "fine", "fine", seconds=0.3)
    executor = find_executor(f"ray:{cluster.address}")
    assert executor is not None
    assert executor.run(all_jobs, quiet) == []
    assert all(job.finished() for job in all_jobs)


def test_stopped_jobs_write_a_checkpoint_of_their_last_step(cluster: Any, tmp_path: Path) -> None:
    long = plan(settings(epochs=20_000, checkpoint_every="1000000 steps"), tmp_path / "sweep")

    def stop(progress: JobProgress) -> None:
        if progress.fraction:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(long, on_progress=stop, executor=find_executor(f"ray:{cluster.address}"))
    runs = [load_run(job.folder) for job in long.jobs if (job.folder / "run.json").exists()]
    assert runs
    for run in runs:
        with run:
            assert run.status == "stopped"
            assert run.load_checkpoint()[0] == run.series("loss/step")[0][-1] > 1
