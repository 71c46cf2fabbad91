"""One training on several processes against the same training on one."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # where configs find process_jobs:Double
import process_jobs
from process_jobs import SIZE, config, free_port

from excite.runs import Run, load_run
from excite.train.distributed.data_parallel import part_of
from excite.train.from_config import train

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "scipy", "sklearn.datasets", "excite.train.from_config"]
)


def together(jobs: list[tuple[dict[str, Any], Path]], told: Path, **stop: Any) -> tuple[list[Any], list[int]]:
    """Train on two processes; what each raised, and how each ended."""
    codes = start(process_jobs.process, [(config, str(path)) for config, path in jobs], str(told), stop)
    files = [Path(f"{told}-{rank}.json") for rank in range(SIZE)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files], codes


def start(target: Any, *arguments: Any) -> list[int]:
    """Two processes, each with its rank and the same port; how each ended."""
    port = free_port()
    processes = [FORKS.Process(target=target, args=(rank, port, *arguments)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)  # importing torch twice takes long on a busy machine
    hung = [process.kill() for process in processes if process.exitcode is None]
    assert not hung, "did not end"
    return [int(process.exitcode or 0) for process in processes]


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
    # Alerts look back on what was measured before, and forget it when a training is stopped.
    first, second = (f[~f["name"].str.startswith("alert/")].reset_index() for f in (one.frame(), many.frame()))
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


# The last batch has one sample, which both processes take: the controller of the radius counts it once.
AUTO = {"data": {"name": "digits", "train": 101, "test": 33}, "excitation": {"radius": "auto"}, "loss": "cross-entropy"}
WAYS: dict[str, dict[str, Any]] = {
    "excited": config(augment={"shift": 1}),
    # The last batch has 9 points: one process knows how 5 of them lie in the network, the other one meets 4 for the first time.
    "sharded": config(
        sharded=True, augment={"shift": 1}, data={"name": "digits", "classes": [3, 8], "train": 109, "test": 33}
    ),
    "relative": config("mlp", options={"inputs": 64}, excitation={"relative": 0.1, "stages": 2}, schedule="one-cycle"),
    "auto": config("mlp", options={"inputs": 64, "outputs": 10}, optimizer={"name": "adamw"}, epochs=1, **AUTO),
    "auto-sharded": config(
        "mlp", options={"inputs": 64, "outputs": 10}, optimizer={"name": "adamw"}, epochs=1, sharded=True, **AUTO
    ),
    "noisy": config(options={"dropout": 0.3, "norm": True}, data={"name": "digits", "classes": [3, 8], "train": 105}),
    "adversarial": config(excitation=None, adversarial={"radius": 0.05, "steps": 2, "random_start": False}, epochs=1),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    raised, codes = together([(config, folder / name) for name, config in WAYS.items()], folder / "told")
    assert raised == [None, None]
    assert codes == [0, 0]
    return folder


# -- the results -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "noisy"])
def test_two_processes_have_the_results_of_one(two: Path, tmp_path: Path, way: str) -> None:
    compare(alone(WAYS[way], tmp_path / "run"), load_run(two / way))


@pytest.mark.slow
def test_what_differs_is_said_and_the_rest_is_as_on_one(two: Path) -> None:
    """Dropout and batch normalization: another number of processes, other results; but everything is there, once."""
    run = load_run(two / "noisy")
    steps, losses = run.series("loss/step")
    assert steps.tolist() == list(range(1, 23))
    assert bool(torch.isfinite(torch.tensor(losses)).all())
    _, state = run.load_checkpoint()
    assert len(state["streams"]) == SIZE
    first, second = (stream["torch"] for stream in state["streams"])
    assert not torch.equal(first, second)  # each process drops its own units
    assert int(state["model"]["inner.8.num_batches_tracked"]) == 22
    assert run.read_json("time")["processes"] == SIZE


@pytest.mark.parametrize(("rows", "size"), [(10, 2), (11, 2), (10, 4), (3, 3), (2, 3), (1, 2)])
def test_means_of_parts_average_to_the_mean(rows: int, size: int) -> None:
    x = torch.randn(rows, dtype=torch.float64)
    parts = [part_of(x, rank, size) for rank in range(size)]
    assert sum(weight * float(part.mean()) for part, weight in parts) / size == pytest.approx(
        float(x.mean()), rel=1e-13
    )
    if rows >= size:
        assert torch.equal(torch.cat([part for part, _ in parts]), x)


# -- ending and going on -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of which one process was killed after step 10, three steps past the checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    for rank, way in ((1, "excited"), (0, "noisy")):
        raised, codes = together([(WAYS[way], folder / way)], folder / f"told-{way}", how="kill", rank=rank, step=10)
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] == 0  # the test's own process: it has written what it raised
        assert raised[1 - rank][0] == "RankLost"
        assert "one of the 2 processes is gone (killed, or its machine is): start the same" in raised[1 - rank][1]
        run = load_run(folder / way)
        assert run.status == "stopped"
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [7]
    return folder


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_bits(killed: Path, two: Path, tmp_path: Path) -> None:
    jobs = []
    for way in ("excited", "noisy"):
        shutil.copytree(killed / way, tmp_path / way)
        jobs.append((WAYS[way], tmp_path / way))
    jobs.append((WAYS["sharded"], tmp_path / "sharded"))
    alone_until(WAYS["sharded"], tmp_path / "sharded", 16)
    assert together(jobs, tmp_path / "told") == ([None, None], [0, 0])
    for way in ("excited", "noisy"):
        compare(load_run(two / way), load_run(tmp_path / way), within=0.0)
    compare(load_run(two / "sharded"), load_run(tmp_path / "sharded"))  # begun by one process


@pytest.mark.slow
def test_one_process_goes_on_where_two_were(killed: Path, two: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "excited", tmp_path / "excited")
    compare(load_run(two / "excited"), alone(WAYS["excited"], tmp_path / "excited"))


def alone_until(config: dict[str, Any], path: Path, last: int) -> None:
    """One process, interrupted after a step."""

    def interrupt(_: str, done: int, total: int) -> None:
        if done == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, path, interrupt)


@pytest.mark.slow
def test_what_ends_one_process_ends_the_other_in_one_line(tmp_path: Path) -> None:
    raised, codes = together([(WAYS["excited"], tmp_path / "run")], tmp_path / "told", how="raise", rank=1, step=10)
    assert codes == [0, 0]
    assert raised[1] == ["ValueError", "this one\ncannot go on"]
    assert raised[0] == ["OtherProcess", "process 1 of 2 failed: this one cannot go on"]
    run = load_run(tmp_path / "run")
    assert (run.status, run.reason) == ("failed", "process 1 of 2 failed: this one cannot go on")


@pytest.mark.slow
def test_what_interrupts_one_process_stops_the_other(tmp_path: Path) -> None:
    raised, codes = together([(WAYS["excited"], tmp_path / "run")], tmp_path / "told", how="interrupt", rank=1, step=10)
    assert codes == [0, 0]
    assert raised[1] == ["KeyboardInterrupt", ""]
    assert raised[0][0] == "OtherProcess"
    assert "process 1 of 2 was interrupted: start the same command again to continue" in raised[0][1]
    assert load_run(tmp_path / "run").status == "stopped"


@pytest.mark.slow
def test_sigterm_of_one_rank_checkpoints_all(two: Path, tmp_path: Path) -> None:
    """Rank 1 alone gets the signal after step 9; all ranks stop after step 10, and resume to the same bits."""
    raised, codes = together([(WAYS["excited"], tmp_path / "run")], tmp_path / "told", how="sigterm", rank=1, step=9)
    assert codes == [0, 0]
    assert [kind for kind, _ in raised] == ["KeyboardInterrupt"] * 2
    run = load_run(tmp_path / "run")
    assert run.status == "stopped"
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [7, 10]
    assert together([(WAYS["excited"], tmp_path / "run")], tmp_path / "told") == ([None, None], [0, 0])
    compare(load_run(two / "excited"), load_run(tmp_path / "run"), within=0.0)


@pytest.mark.slow
def test_what_all_processes_meet_is_said_by_one(tmp_path: Path) -> None:
    """A loss that overflows, a parameter that nothing depends on."""
    wild = config(optimizer={"name": "sgd", "lr": 1e200})
    cases = {
        "wild": (wild, "TrainingStopped", "at step 2: training stopped, there is no checkpoint yet"),
        "idle": (config(options={"idle": True}), "ModelError", "parameter 'idle.weight' has no influence on the loss"),
    }
    for name, (given, kind, words) in cases.items():
        raised, codes = together([(given, tmp_path / name)], tmp_path / f"told-{name}", expected=True)
        assert codes == [0, 0]
        assert {raised[0][0], raised[1][0]} == {kind, "OtherProcess"}
        assert words in raised[0][1]
        assert load_run(tmp_path / name).status == "failed"
        assert words in str(load_run(tmp_path / name).reason)


# -- what is wrong before they meet ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_taken_apart_right_after_parting() -> None:
    assert start(process_jobs.parting, 15) == [0, 0]


# -- the guide ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_examples_of_the_guide_run_on_two_processes(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "many-processes.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert len(blocks) == 3
    assert start(process_jobs.example, blocks, "test_docs", str(tmp_path)) == [0, 0]
    for name in ("first", "own-loop", "own"):
        assert load_run(tmp_path / "runs" / name).status == "done"
    steps, losses = load_run(tmp_path / "runs" / "own").series("loss/step")
    assert steps.tolist() == [1, 2, 3]
    # The same loop on one process, with the whole batch.
    names = importlib.import_module("test_docs").given()
    loop = blocks[2].replace("runs/own", str(tmp_path / "alone"))
    exec(compile("from excite.train import many_processes\n" + loop, "example", "exec"), names)
    assert losses == pytest.approx(load_run(tmp_path / "alone").series("loss/step")[1], rel=1e-5)


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    given = config()
    (tmp_path / "first.json").write_text(json.dumps(given))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}

    def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
        command += [str(free_port()), "-m", "excite", "train", str(tmp_path / "first.json"), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=900)

    done = torchrun("--folder", "two", "--no-margins")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run: two") == 1
    compare(alone(given, tmp_path / "one"), load_run(tmp_path / "two"))

    (tmp_path / "first.json").write_text(json.dumps({**given, "model": {"name": "small-cnn"}, "epochs": 1}))
    done = torchrun()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run: runs/first") == 1
    assert any("margin" in path.name for path in (tmp_path / "runs" / "first" / "artifacts").iterdir())

    (tmp_path / "first.json").write_text(json.dumps({**given, "batches": 3}))
    wrong = torchrun("--folder", "wrong")
    assert wrong.returncode != 0
    assert wrong.stderr.count("excite: ") == 1
    assert "excite: " + str(tmp_path / "first.json") + ": unknown key 'batches': did you mean 'batch'?" in wrong.stderr
    (tmp_path / "first.json").write_text(json.dumps({**given, "seed": 5}))
    other = torchrun("--folder", "two")
    assert other.stderr.count("excite: ") == 1
    assert "excite: two was made with another config (seed: 4 in the run, 5 now)" in other.stderr
