"""Ctrl-C and SIGTERM end a training after the step under way: with a checkpoint, and to be continued to the same bits."""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import excite
import excite.cli.commands.train as command
from excite.data import load
from excite.jobs.executors import ProcessExecutor
from excite.jobs.progress import JobProgress
from excite.jobs.training_job import TrainingJob
from excite.runs import load_run
from excite.train import fit
from excite.train.config import parse_config
from excite.train.from_config import train, train_together
from excite.train.stopping import stop_signals
from excite.train.trainer import Trainer

CONFIG: dict[str, Any] = {
    "data": {"name": "moons", "train": 60, "test": 30},
    "model": {"name": "mlp", "options": {"widths": [8]}},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "epochs": 3,
    "batch": 25,
    "checkpoint_every": "100 epochs",
}  # nine steps
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def send(at: int, *numbers: signal.Signals) -> Any:
    def progress(phase: str, done: int, total: int) -> None:
        if done == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    return progress


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    train(CONFIG, path).close()
    return path


def same(one: Path, two: Path) -> None:
    with load_run(one) as a, load_run(two) as b:
        first, second = a.load_checkpoint()[1]["model"], b.load_checkpoint()[1]["model"]
        assert a.frame().equals(b.frame())
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_a_signal_writes_a_checkpoint_and_the_run_says_stopped(
    tmp_path: Path, whole: Path, number: signal.Signals, at: int
) -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt), stop_signals():
        train(CONFIG, tmp_path / "run", send(at, number))
    assert handlers() == before
    with load_run(tmp_path / "run") as run:
        assert run.status == "stopped"
        assert [c.step for c in run.checkpoints()] == [at]
    steps: list[int] = []
    train(CONFIG, tmp_path / "run", lambda phase, done, total: steps.append(done)).close()
    assert steps == list(range(at + 1, 10))
    same(whole, tmp_path / "run")


def test_a_signal_at_the_last_step_leaves_a_run_that_is_done(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(KeyboardInterrupt), stop_signals():
        train(CONFIG, tmp_path / "run", send(9, signal.SIGTERM))
    assert load_run(tmp_path / "run").status == "done"
    same(whole, tmp_path / "run")


@pytest.mark.parametrize("networks", [1, 2])
def test_a_signal_before_the_final_checkpoint_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, networks: int
) -> None:
    save = Trainer._save

    def signalled(training: Trainer, state: dict[str, Any], final: bool) -> None:
        if final:
            os.kill(os.getpid(), signal.SIGTERM)
        save(training, state, final)

    monkeypatch.setattr(Trainer, "_save", signalled)
    configs = [parse_config({**CONFIG, "seed": seed}) for seed in range(networks)]
    paths = [tmp_path / f"run-{seed}" for seed in range(networks)]
    with pytest.raises(KeyboardInterrupt), stop_signals(insist=False):
        if networks == 1:
            train(configs[0], paths[0])
        else:
            train_together(configs, paths)
    for path in paths:
        assert load_run(path).status == "done"
        assert [c.step for c in load_run(path).checkpoints()][-1] == 9


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_signals():
            assert train(CONFIG, tmp_path / "run", send(4, signal.SIGINT)).status == "done"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_at_once() -> None:
    calls = 0

    def insist(x: Any, y: Any) -> Any:
        nonlocal calls
        calls += 1
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("still here")

    model = nn.Linear(2, 1)
    with pytest.raises(KeyboardInterrupt), stop_signals():
        fit(
            model,
            load("moons", train=20, test=10),
            insist,
            torch.optim.SGD(model.parameters(), 0.1),
            epochs=1,
            batch=10,
        )
    assert calls == 1


def test_an_interrupt_in_progress_writes_a_checkpoint_too(tmp_path: Path, whole: Path) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, tmp_path / "run", interrupt)
    assert [c.step for c in load_run(tmp_path / "run").checkpoints()] == [4]
    train(CONFIG, tmp_path / "run").close()
    same(whole, tmp_path / "run")


def test_networks_trained_together_all_write_a_checkpoint(tmp_path: Path) -> None:
    configs = [parse_config({**CONFIG, "seed": seed}) for seed in range(3)]
    paths = [tmp_path / f"run-{seed}" for seed in range(3)]
    with pytest.raises(KeyboardInterrupt), stop_signals():
        train_together(configs, paths, send(5, signal.SIGTERM))
    for path in paths:
        assert load_run(path).status == "stopped"
        assert [c.step for c in load_run(path).checkpoints()] == [5]
    for run in train_together(configs, paths):
        assert run.status == "done"


def test_neither_watch_nor_train_installs_handlers(tmp_path: Path) -> None:
    before, inside = handlers(), []
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.randn(8, 2)
    with excite.watch(model, example=x, run=tmp_path / "watched") as watch:
        loss = model(x).square().mean()
        loss.backward()
        watch.step(loss)
        inside.append(handlers())
    train({**CONFIG, "epochs": 1}, tmp_path / "run", lambda *a: inside.append(handlers())).close()
    assert all(found == before for found in [*inside, handlers()])


@pytest.mark.parametrize("number", SIGNALS)
def test_the_command_stops_with_a_checkpoint(
    excite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    @contextmanager
    def progress(single: bool = False) -> Any:
        yield send(4, number)

    (tmp_path / "first.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(command, "progress_bars", progress)
    before = handlers()
    status, _, err = excite("train", "first.json", "--no-margins")
    assert status == 130
    assert "the same command continues" in err
    assert handlers() == before
    assert [c.step for c in load_run(tmp_path / "runs/first").checkpoints()] == [4]
    assert load_run(tmp_path / "runs/first").status == "stopped"


@pytest.mark.slow
def test_workers_write_a_checkpoint_when_rank_0_is_stopped(tmp_path: Path) -> None:
    config = parse_config({**CONFIG, "epochs": 100_000, "checkpoint_every": "100000 epochs", "watch": False})
    task = TrainingJob("variant", 0, tmp_path / "run-0", config)

    def stop(progress: JobProgress) -> None:
        if progress.phase == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProcessExecutor(1).run([task], stop)
    with load_run(task.folder) as run:
        assert run.status == "stopped"
        assert len(run.checkpoints()) == 1
