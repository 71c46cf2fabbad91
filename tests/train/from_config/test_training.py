from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from excite.errors import RunError
from excite.margin import SearchOptions
from excite.runs import Run, load_run
from excite.train.config import parse_config
from excite.train.evaluate import load_model, measure
from excite.train.from_config import load_trained, train, training

MOONS: dict[str, Any] = {
    "data": {"name": "moons", "train": 60, "test": 30},
    "model": {"name": "mlp", "options": {"widths": [8]}},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "epochs": 3,
    "batch": 25,
}


def test_a_config_becomes_a_run(tmp_path: Path) -> None:
    steps = []
    with train(MOONS, tmp_path / "run", lambda *a: steps.append(a)) as run:
        assert run.status == "done"
        assert run.mode == "r"
        assert {"loss/step", "accuracy/test", "distance/absolute", "accuracy/train"} <= set(run.names())
        assert any(name.startswith("rank/") for name in run.names())
        assert parse_config(run.config) == parse_config(MOONS)
        model, config, data = load_trained(run)
    assert steps[-1] == ("training", 9, 9)
    assert config.epochs == 3
    with torch.no_grad():
        right = ((model(data.x_test).squeeze(1) > 0.5).long() == data.y_test).double().mean().item()
    assert right == load_run(tmp_path / "run").series("accuracy/test")[1][-1]


def test_the_same_config_continues_and_another_is_refused(tmp_path: Path) -> None:
    train(MOONS, tmp_path / "run").close()
    steps: list[Any] = []
    train(MOONS, tmp_path / "run", lambda *a: steps.append(a)).close()
    assert steps == []  # it was done
    with pytest.raises(RunError, match="batch: 25 in the run, 30 now"):
        train({**MOONS, "batch": 30}, tmp_path / "run")
    assert load_run(tmp_path / "run").status == "done"


def test_a_run_made_before_a_setting_existed_is_the_same_run(tmp_path: Path) -> None:
    train({**MOONS, "epochs": 1}, tmp_path / "run").close()
    stored = json.loads((tmp_path / "run/config.json").read_text())
    del stored["loss"], stored["augment"]
    (tmp_path / "run/config.json").write_text(json.dumps(stored))
    train({**MOONS, "epochs": 1}, tmp_path / "run").close()
    with pytest.raises(RunError, match="loss: None in the run, 'cross-entropy' now"):
        train({**MOONS, "epochs": 1, "loss": "cross-entropy"}, tmp_path / "run")


def test_an_interrupted_training_continues_to_the_same_weights(tmp_path: Path) -> None:
    config = {**MOONS, "excitation": {"radius": 0.05, "stages": 3}, "checkpoint_every": 2}
    whole = train(config, tmp_path / "whole")

    def interrupt(phase: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", interrupt)
    assert load_run(tmp_path / "run").status == "stopped"
    run = train(config, tmp_path / "run")
    one, two = (r.load_checkpoint()[1]["model"] for r in (whole, run))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert whole.frame().equals(run.frame())


def test_two_starts_on_an_unstarted_run_do_not_remove_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start comes between the check of the first and what follows it."""

    def fail(*a: Any) -> None:
        raise ValueError("before the first checkpoint")

    path = tmp_path / "run"
    with pytest.raises(ValueError, match="before"):
        train(MOONS, path, fail)
    assert load_run(path).status == "failed"
    made, started = training._unstarted, list[Run]()

    def check(folder: Path) -> bool:
        found = made(folder)
        if not started:
            monkeypatch.setattr(training, "_unstarted", made)
            training._clear_unstarted(folder)
            started.append(Run.create(folder, {"by": "the second start"}))
        return found

    monkeypatch.setattr(training, "_unstarted", check)
    with pytest.raises(RunError, match="another process is writing"):
        train(MOONS, path)
    started[0].log(1, {"a/b": 1.0})
    started[0].close("done")
    assert load_run(path).config == {"by": "the second start"}
    assert len(load_run(path).frame()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_another_kind_of_run_is_never_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Run.create(tmp_path / "run", {"watch": {}}) as run:
        run.log(1, {"a/b": 1.0})
        raise KeyboardInterrupt
    with pytest.raises(RunError, match="another config"):
        train(MOONS, tmp_path / "run")
    assert len(load_run(tmp_path / "run").frame()) == 1


def test_keep_is_the_number_of_checkpoints(tmp_path: Path) -> None:
    with train({**MOONS, "checkpoint_every": 1, "keep": 4}, tmp_path / "run") as run:
        assert [c.step for c in run.checkpoints()] == [5, 6, 7, 8, 9]


def test_augmented_data_continue_to_the_same_weights(tmp_path: Path) -> None:
    digits = {"data": {"name": "digits", "classes": [3, 8], "train": 60, "test": 20}, "model": {"name": "small-cnn"}}
    config = {**MOONS, **digits, "augment": {"shift": 1}, "loss": "cross-entropy", "checkpoint_every": 2}
    whole = train(config, tmp_path / "whole").load_checkpoint()[1]["model"]

    def interrupt(phase: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", interrupt)
    again = train(config, tmp_path / "run").load_checkpoint()[1]["model"]
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    same = train({**config, "augment": None}, tmp_path / "same").load_checkpoint()[1]["model"]
    assert not torch.equal(whole["0.weight"], same["0.weight"])


@pytest.mark.slow
def test_cross_entropy_has_two_outputs_and_measures(tmp_path: Path) -> None:
    with train({**MOONS, "loss": "cross-entropy", "epochs": 10}, tmp_path / "run") as run:
        assert run.load_checkpoint()[1]["model"]["3.bias"].shape == (2,)
        last = run.series("accuracy/test")[1][-1]
    saved = load_model(tmp_path / "run")
    found = measure(saved, norm="2", max_points=10, options=SearchOptions(steps=5, restarts=1))
    assert len(found["test"]) == 10
    with torch.no_grad():
        right = (saved.model(saved.data.x_test).argmax(1) == saved.data.y_test).double().mean().item()
    assert last == right == load_run(tmp_path / "run").read_json("summary")["accuracy"]["test"]


LEAN = """
import sys
import excite.train, excite.runs, excite.data
from excite.train import build, fit, squared_error
from excite.runs import Run
import torch
data = excite.data.load("moons", train=40)
model = build("mlp", inputs=2)
with Run.create(sys.argv[1], {}) as run:
    fit(model, data, squared_error(model), torch.optim.Adam(model.parameters()), epochs=1, batch=20, run=run)
    print(run.series("loss/step")[0].tolist())
print({"pydantic", "pandas", "pooch", "sklearn", "matplotlib", "plotly", "typer"} & set(sys.modules))
"""


@pytest.mark.slow
def test_fit_runs_and_data_work_without_the_rest(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN, str(tmp_path / "run")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "[1, 2]\nset()\n", done.stderr
