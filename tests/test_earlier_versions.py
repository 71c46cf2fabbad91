"""Folders written by version 0.1.0, before modules moved, still load, continue and draw (tests/fixtures/0.1.0)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from excite.runs import Run, load_run
from excite.train import load_config, load_trained, train

FIXTURES = Path(__file__).parent / "fixtures" / "0.1.0"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(FIXTURES, tmp_path / "stored"))


def values(run: Run) -> pd.Series:
    frame = run.frame()
    return frame[~frame["name"].str.startswith("time")].set_index(["step", "name"])["value"].sort_index()


@pytest.mark.parametrize("name", ["done", "interrupted", "watched", "sweep/optimizer.lr-0.1-0"])
def test_runs_load(stored: Path, name: str) -> None:
    run = load_run(stored / name)
    assert run.status == ("stopped" if name == "interrupted" else "done")
    assert {"loss"} <= {row.split("/")[0] for row in run.frame()["name"]}


def test_a_trained_model_loads_with_its_config_and_data(stored: Path) -> None:
    model, config, data = load_trained(load_run(stored / "done"))
    assert config == load_config(stored / "moons.toml")
    assert model(data.x_test).shape == (40, 1)


def test_an_interrupted_training_continues_to_the_same_end(stored: Path) -> None:
    train(load_config(stored / "moons.toml"), stored / "interrupted")
    ended, expected = load_run(stored / "interrupted"), load_run(stored / "done")
    assert ended.status == "done"
    mine, theirs = values(ended), values(expected)
    assert list(mine.index) == list(theirs.index)
    # Nine steps of float32 with other kernels than those of the machine that wrote them.
    pd.testing.assert_series_equal(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_commands_on_an_earlier_run(stored: Path, excite) -> None:
    for arguments in (
        ("report", stored / "done", stored / "watched", "--out", stored / "report.html"),
        ("margins", stored / "done"),
        ("audit", stored / "done", "--out", stored / "audit.html"),
        ("repair", stored / "interrupted"),
    ):
        status, out, error = excite(*arguments)
        assert status == 0, (arguments, out, error)
    assert (stored / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_finished_sweep_and_study_are_not_computed_again(stored: Path, excite) -> None:
    before = (stored / "sweep" / "sweep.json").read_text()
    status, _, error = excite("sweep", stored / "sweep.toml", "--out", stored / "sweep", "--workers", "1")
    assert status == 0, error
    assert (stored / "sweep" / "sweep.json").read_text() == before
    results = sorted((stored / "study").rglob("result.json"))
    assert len(results) == 4
    times = [path.stat().st_mtime_ns for path in results]
    command = ("study", "run", "decomposition", "--seeds", "1", "--workers", "1", "--out", stored / "study")
    status, _, error = excite(*command)
    assert status == 0, error
    assert [path.stat().st_mtime_ns for path in results] == times
    assert (stored / "study" / "figure.png").stat().st_size > 10_000
