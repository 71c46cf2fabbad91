"""A database that is locked for long, configs that are equal, names that are odd, and results for a run that is busy."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import excite as library
from excite.errors import InputError, TrainingStopped
from excite.margin import SearchOptions
from excite.runs import Run, load_run, metrics
from excite.train import trainer as loop
from excite.train.evaluate import load_model, measure
from excite.train.from_config import train

MOONS: dict[str, Any] = {
    "data": {"name": "moons", "train": 40, "test": 20},
    "model": {"name": "mlp", "options": {"widths": [4]}},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 4,
    "batch": 10,
    "watch": False,
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a locked database for a moment only, and ask for it at every value."""
    monkeypatch.setattr(metrics, "_BRIEFLY", 0.0)
    monkeypatch.setattr(metrics, "_PAUSE", 1e-9)
    monkeypatch.setattr(metrics, "_MAX_PAUSE", 1e-9)
    monkeypatch.setattr(metrics, "_FLUSH_SECONDS", -1.0)
    monkeypatch.setattr(loop, "_PATIENCE", 0.0)


def locked(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path / "metrics.db", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("until", [6, 15])
def test_a_training_goes_on_while_the_database_is_locked(tmp_path: Path, until: int) -> None:
    whole = train(MOONS, tmp_path / "whole").frame()
    held: list[sqlite3.Connection] = []

    def hold(phase: str, done: int, total: int) -> None:
        if done == 2:
            held.append(locked(tmp_path / "run"))
        if done == until:
            held[0].close()

    with pytest.warns(UserWarning, match="no checkpoint at step 4") as caught:
        run = train(MOONS, tmp_path / "run", hold)
    said = [str(warning.message) for warning in caught]
    assert "metrics wait in memory for now, training continues" in said[0]
    assert "no checkpoint at step 4, training continues" in said[1]
    assert "written to" in said[-1]
    assert "nothing is lost" in said[-1]
    assert run.status == "done"
    assert run.frame().equals(whole)


@pytest.mark.usefixtures("impatient")
def test_a_database_that_stays_locked_fails_training_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_FINAL_TRIES", 3)
    held: list[sqlite3.Connection] = []

    def hold(phase: str, done: int, total: int) -> None:
        if done == 6:
            held.append(locked(tmp_path / "run"))

    monkeypatch.setattr(metrics, "_PATIENCE", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TrainingStopped, match=r"locked by another process.*checkpoint is that of step 4"):
            train(MOONS, tmp_path / "run", hold)
    held[0].close()
    assert train(MOONS, tmp_path / "run").series("loss/step")[0].tolist() == list(range(1, 17))


def test_values_that_wait_in_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    monkeypatch.setattr(metrics, "_MAX_WAITING", 3)
    with Run.create(tmp_path / "run", {}) as run:
        with closing(locked(run.path)), pytest.warns(UserWarning, match="wait in memory"):
            for step in range(10):
                run.log(step, {"a/b": 1.0})
        with pytest.warns(UserWarning, match="7 values are lost"):
            run.flush()
        assert run.series("a/b")[0].tolist() == [7, 8, 9]


EQUAL: list[dict[Any, Any]] = [
    {"betas": (0.9, 0.999)},
    {"threshold": math.nan},
    {"deep": {"list": [1, (2, math.nan)]}},
    {"layers": {0: 0.1, 1: 0.2}},
    {3: "an integer"},
    {"lr": 1},
]


@pytest.mark.parametrize("config", EQUAL)
def test_a_run_is_continued_with_an_equal_config(tmp_path: Path, config: dict[Any, Any]) -> None:
    Run.create(tmp_path / "run", config).close()
    Run.create(tmp_path / "run", config, resume=True).close()
    with pytest.raises(library.ExciteError, match="another config"):
        Run.create(tmp_path / "run", {**config, "other": (1, math.nan)}, resume=True)


def test_numbers_that_are_equal_are_equal_configs(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", {"lr": 1}).close()
    with Run.create(tmp_path / "run", {"lr": 1.0}, resume=True) as run:
        assert run.config == {"lr": 1}
    with pytest.raises(library.ExciteError, match="another config"):
        Run.create(tmp_path / "run", {"lr": 1.5}, resume=True)


ODD = "[bold] [/red] [link=x] :smile: run"


@pytest.mark.slow
def test_names_with_brackets_are_printed_as_they_are(excite: Any, tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps(MOONS))
    status, out, err = excite("train", "small.json", "--run", f"runs/{ODD}", "--no-margins")
    assert status == 0, err
    assert f"run: runs/{ODD}" in out
    for command in (
        ("margins", "--points", "2", "--steps", "2"),
        ("audit", "--points", "3", "--no-margins"),
        ("report",),
    ):
        status, out, err = excite(command[0], f"runs/{ODD}", *command[1:])
        assert status == 0, err
    assert ODD in excite("repair", f"runs/{ODD}")[1]


@pytest.mark.parametrize("name", ["x" * 256, "ü" * 128, "a\0b"])
def test_a_name_that_no_folder_can_have_is_one_line(excite: Any, tmp_path: Path, name: str) -> None:
    if "\0" not in name:
        (tmp_path / "small.json").write_text(json.dumps(MOONS))
        status, _, err = excite("train", "small.json", "--run", f"runs/{name}")
        assert status == 1
        assert "256 bytes" in err
        assert err.count("\n") == 1
    model = nn.Linear(2, 1)
    for used in (
        lambda: Run.create(tmp_path / name, {}),
        lambda: load_run(tmp_path / name),
        lambda: train(MOONS, tmp_path / name),
        lambda: library.watch(model, torch.ones(2, 2), tmp_path / name),
    ):
        with pytest.raises(InputError):
            used()


def test_the_longest_name_is_taken(tmp_path: Path) -> None:
    Run.create(tmp_path / ("x" * 255), {}).close()
    assert os.listdir(tmp_path) == ["x" * 255]


@pytest.mark.slow
def test_margins_of_a_busy_run_are_printed_as_not_stored(
    excite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(MOONS, tmp_path / "run").close()
    with Run.open(tmp_path / "run", "a"):
        status, out, err = excite("margins", "run", "--points", "3", "--steps", "2")
        assert status == 0, err
        assert out.index("the results will be printed, not stored") < out.index("gap between the curves")
        assert "not stored: another process is writing" in out.splitlines()[-1]
        status, out, err = excite("audit", "run", "--points", "3", "--no-margins")
        assert status == 0, err
        assert "not stored in the run: another process" in out
        monkeypatch.setattr(
            "excite.train.evaluate.margins", lambda *a, **k: pytest.fail("measured before it was known")
        )
        with pytest.raises(library.ExciteError, match="another process is writing"):
            measure(load_model(tmp_path / "run"))
    assert list((tmp_path / "run/artifacts").glob("margins-*")) == []


def test_margins_of_a_run_on_a_read_only_disk_are_printed(
    excite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(MOONS, tmp_path / "run").close()
    opened = os.open

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT) and str(path).startswith(str(Path("run"))):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    status, out, err = excite("margins", "run", "--points", "3", "--steps", "2")
    assert status == 0, err
    assert "gap between the curves" in out
    assert "not stored: cannot write run: the disk is read-only" in out.splitlines()[-1]


def test_measuring_leaves_the_status_of_a_killed_run(tmp_path: Path) -> None:
    train(MOONS, tmp_path / "run").close()
    marker = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**marker, "status": "running"}))
    measure(load_model(tmp_path / "run"), most=2, options=SearchOptions(steps=2))
    assert load_run(tmp_path / "run").status == "stopped"
