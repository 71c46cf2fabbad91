"""Margins of a saved model are stored in its run, and never replaced by those of fewer points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from excite.errors import RunError
from excite.runs import Run, load_run
from excite.train.evaluate import artifact_name, load_model, measure, why_not_stored
from excite.train.from_config import train

CONFIG: dict[str, Any] = {
    "data": {"name": "moons", "train": 20, "test": 10},
    "model": {"name": "mlp", "options": {"widths": [4]}},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 1,
    "batch": 10,
    "watch": False,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(CONFIG, path).close()
    return path


def test_a_model_is_loaded_with_its_data(run: Path) -> None:
    saved = load_model(run)
    assert (saved.step, saved.threshold, saved.run) == (2, 0.5, run)
    assert [len(saved.points(part)[0]) for part in ("train", "test")] == [20, 10]
    assert len(saved.points("train", 7)[0]) == 7
    with pytest.warns(DeprecationWarning, match="use max_points"):
        assert len(saved.points("train", most=7)[0]) == 7
    assert load_model(load_run(run).checkpoints()[-1].path).step == 2


def test_margins_of_fewer_points_replace_nothing(run: Path) -> None:
    saved = load_model(run)
    for count, stored in ((8, 8), (3, 8)):
        margins = measure(saved, splits=("train",), max_points=count, steps=3)
        assert len(margins["train"]) == count
        assert len(load_run(run).read_json(artifact_name("inf", "train"))["values"]) == stored


def test_a_run_that_is_written_to_stores_nothing(run: Path) -> None:
    saved = load_model(run)
    assert why_not_stored(saved) is None
    assert why_not_stored(replace(saved, run=None)) == "a file of weights is not a run"
    assert why_not_stored(replace(saved, data_from="other")) == "measured on other data than the run's own"
    with Run.open(run, "a"):
        assert "another process is writing" in str(why_not_stored(saved))
        with pytest.raises(RunError, match="another process is writing"):
            measure(load_model(run), splits=("train",), max_points=3, steps=3)


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    Run.create(tmp_path / "other", {}).close()
    with pytest.raises(RunError, match=r"there is no checkpoint in .*, and no weights: store them with .*run.save"):
        load_model(tmp_path / "other")
