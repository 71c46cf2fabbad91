"""A real Ray cluster of two nodes on this machine: a lost node, a killed worker, work that fails, bad input."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_jobs import jobs, tries_of
from excite.engines import find_engine
from excite.errors import InputError

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
        (find_engine(f"ray:{cluster.address}", gpus=64), "gpus-per-task 64: the cluster has 0 GPUs"),
    ):
        assert engine is not None
        with pytest.raises(InputError, match=words):
            engine.perform(todo, quiet)
    assert not todo[0].folder.exists()
