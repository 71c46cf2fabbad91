"""Killed at any step and continued, a training ends with the same bits as one that was left alone."""

from __future__ import annotations

import multiprocessing
import random
import runpy
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from excite.runs import load_run

JOB = Path(__file__).with_name("resume_job.py")
STEPS = 6 * 8  # six epochs of eight batches


# Loading torch takes seconds; a server that has loaded it forks a fresh process for every start.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch", "torch._dynamo", "scipy", "excite.train", "excite.monitor.watch", "excite.excitation"]
)


def launch(path: Path, kind: str, kill_at: int | None = None) -> Any:
    arguments = [str(path), kind, *([str(kill_at)] if kill_at is not None else [])]
    process = FORKS.Process(target=runpy.run_path, args=(str(JOB), {"ARGUMENTS": arguments}, "__main__"))
    process.start()
    return process


def start(path: Path, kind: str, kill_at: int | None = None) -> int:
    process = launch(path, kind, kill_at)
    process.join(120)
    assert process.exitcode is not None, "did not end"
    assert process.exitcode in (0, -signal.SIGKILL)
    return int(process.exitcode)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def compare(whole: Path, broken: Path) -> None:
    one, two = load_run(whole), load_run(broken)
    assert one.status == two.status == "done"
    step, state = one.load_checkpoint()
    again, other = two.load_checkpoint()
    assert step == again == STEPS
    for part in state.keys() - {"seconds"}:
        assert same(state[part], other[part]), part
    first, second = one.frame(), two.frame()
    assert first[["step", "name"]].equals(second[["step", "name"]])
    assert np.array_equal(first["value"], second["value"])  # bit for bit; there is no NaN in it
    assert {"loss/step", "accuracy/train", "accuracy/test", "distance/absolute"} <= set(first["name"])
    assert (first["name"] == "loss/step").sum() == STEPS
    assert two.series("alert/Above/loss/step")[0].tolist() == [1, 20]  # not once more after each restart


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trainings that were left alone, made when first asked for."""

    class Made(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            path = tmp_path_factory.mktemp(kind) / "run"
            start(path, kind)
            self[kind] = path
            return path

    return Made()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("noisy", [3, 9]), ("excited", [21])])
def test_killed_and_continued_is_bit_identical(
    whole: dict[str, Path], tmp_path: Path, kind: str, kills: list[int]
) -> None:
    for kill_at in kills:
        assert start(tmp_path / "run", kind, kill_at) == -signal.SIGKILL
        assert load_run(tmp_path / "run").status == "stopped"
    start(tmp_path / "run", kind)
    compare(whole[kind], tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "noisy", "excited"])
@pytest.mark.parametrize("number", range(7))
def test_killed_at_random_steps(whole: dict[str, Path], tmp_path: Path, kind: str, number: int) -> None:
    generator = random.Random(f"{kind}{number}")
    kills = 0
    while kills < 3 and start(tmp_path / "run", kind, generator.randint(1, STEPS // 2)) == -signal.SIGKILL:
        kills += 1
    assert kills
    start(tmp_path / "run", kind)
    compare(whole[kind], tmp_path / "run")


@pytest.mark.slow
def test_killed_at_any_moment(whole: dict[str, Path], tmp_path: Path) -> None:
    """Not between steps but wherever the process happens to be: while creating, logging, writing a checkpoint."""
    generator, kills, number = random.Random(0), 0, 0
    _ = whole["noisy"]
    while kills < 25:
        number += 1
        for _ in range(8):
            process = launch(tmp_path / str(number), "noisy")
            process.join(generator.uniform(0.02, 0.3))
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            kills += 1
        assert start(tmp_path / str(number), "noisy") == 0
        compare(whole["noisy"], tmp_path / str(number))
