"""One training on several processes against the same training on one."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # where configs find process_jobs:Double
import process_jobs
from process_jobs import SIZE, config, free_port

from excite.runs import Run, load_run
from excite.training import train

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "scipy", "sklearn.datasets", "excite.training"]
)


def together(jobs: list[tuple[dict[str, Any], Path]], told: Path, **stop: Any) -> tuple[list[Any], list[int]]:
    """Train on two processes; what each raised, and how each ended."""
    port = free_port()
    given = [(config, str(path)) for config, path in jobs]
    processes = [
        FORKS.Process(target=process_jobs.process, args=(rank, port, given, str(told), stop)) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    hung = [process.kill() for process in processes if process.exitcode is None]
    assert not hung, "did not end"
    files = [Path(f"{told}-{rank}.json") for rank in range(SIZE)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files], [p.exitcode for p in processes]  # type: ignore[misc]


def alone(config: dict[str, Any], path: Path) -> Run:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(config, path)
    finally:
        torch.set_num_threads(threads)


def compare(one: Run, many: Run, within: float = 1e-10) -> None:
    """Weights, optimizer and everything measured, to rounding; whatever was decided, exactly."""
    (step, state), (again, other) = one.load_checkpoint(), many.load_checkpoint()
    assert one.status == many.status == "done"
    assert step == again
    for part in ("model", "optimizer"):
        assert close(state[part], other[part], within), part
    for part in ("settings", "progress", "shuffle"):
        assert close(state[part], other[part], 0.0), part
    first, second = one.frame(), many.frame()
    assert first[["step", "name"]].equals(second[["step", "name"]])
    assert {"loss/step", "accuracy/train", "accuracy/test", "distance/absolute"} <= set(first["name"])
    assert any(name.startswith("rank/effective/") for name in first["name"])
    for row, theirs in zip(first.itertuples(), second["value"]):
        exact = row.name.startswith("accuracy/")
        assert theirs == pytest.approx(row.value, rel=0 if exact else 1e3 * within, abs=0 if exact else within), row


def close(a: Any, b: Any, within: float) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and float((a.double() - b.double()).abs().max()) <= within
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k], within) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(close(x, y, within) for x, y in zip(a, b))
    return bool(a == b)


AUTO = {"data": {"name": "digits", "train": 101, "test": 33}, "excitation": {"radius": "auto"}, "loss": "cross-entropy"}
WAYS: dict[str, dict[str, Any]] = {
    "excited": config(augment={"shift": 1}),
    "sharded": config(sharded=True, augment={"shift": 1}),
    "relative": config("mlp", options={"inputs": 64}, excitation={"relative": 0.1, "stages": 2}, schedule="one-cycle"),
    "auto": config("mlp", options={"inputs": 64, "outputs": 10}, optimizer={"name": "adamw"}, epochs=1, **AUTO),
    "auto-sharded": config(
        "mlp", options={"inputs": 64, "outputs": 10}, optimizer={"name": "adamw"}, epochs=1, sharded=True, **AUTO
    ),
    "adversarial": config(
        excitation=None, adversarial={"radius": 0.05, "steps": 2, "random_start": False}, epochs=1
    ),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    raised, codes = together([(config, folder / name) for name, config in WAYS.items()], folder / "told")
    assert raised == [None, None]
    assert codes == [0, 0]
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_have_the_results_of_one(two: Path, tmp_path: Path, way: str) -> None:
    compare(alone(WAYS[way], tmp_path / "run"), load_run(two / way))
