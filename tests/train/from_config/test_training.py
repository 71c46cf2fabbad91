from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from excite.errors import InputError, RunError
from excite.margin import SearchOptions
from excite.runs import Run, load_run
from excite.train.config import DataConfig, parse_config
from excite.train.evaluate import load_model, measure
from excite.train.from_config import find_device, load_data, load_trained, train, training

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
    found = measure(saved, norm="2", most=10, options=SearchOptions(steps=5, restarts=1))
    assert len(found["test"]) == 10
    with torch.no_grad():
        right = (saved.model(saved.data.x_test).argmax(1) == saved.data.y_test).double().mean().item()
    assert last == right == load_run(tmp_path / "run").read_json("summary")["accuracy"]["test"]


@pytest.mark.parametrize(
    "excitation",
    [
        {"radius": 0.05},
        {"relative": 0.05, "norm": 2},
        {"radius": {"1": 0.05}},
        {"radius": 0.05, "layers": "input", "bounds": [-3, 3]},
        {"relative": 0.1, "stages": 2, "layers": ["3"], "norm": "1"},
    ],
)
def test_every_kind_of_excitation_changes_the_weights(tmp_path: Path, excitation: dict[str, Any]) -> None:
    plain = train({**MOONS, "watch": False}, tmp_path / "plain").load_checkpoint()[1]["model"]
    excited = train({**MOONS, "watch": False, "excitation": excitation}, tmp_path / "run").load_checkpoint()[1]["model"]
    assert not all(torch.equal(plain[k], excited[k]) for k in plain)


@pytest.mark.parametrize("optimizer", [{"name": "adam"}, {"name": "adamw", "weight_decay": 0.1, "betas": [0.5, 0.9]}])
def test_optimizers(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    run = train({**MOONS, "optimizer": optimizer}, tmp_path / "run")
    group = run.load_checkpoint()[1]["optimizer"]["param_groups"][0]
    assert group["betas"] == tuple(optimizer.get("betas", (0.9, 0.999)))


def test_regression(tmp_path: Path) -> None:
    config = {**MOONS, "data": {"name": "frequencies"}, "optimizer": {"name": "sgd", "lr": 0.001}}
    assert "accuracy/test" not in train(config, tmp_path / "run").names()
    with pytest.raises(InputError, match="regression"):
        train({**config, "excitation": {"radius": 0.1}}, tmp_path / "other")
    with pytest.raises(InputError, match="choose 'squared'"):
        train({**config, "loss": "cross-entropy"}, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"data": {"name": "digit"}}, "did you mean 'digits'"),
        ({"model": {"name": "papers-cnn"}}, "choose 'mlp'"),
        ({"model": {"name": "mpl"}}, "did you mean 'mlp'"),
        ({"excitation": {"radius": {"7": 0.1}}}, "unknown layer '7'"),
        ({"excitation": {"radius": 0, "stages": 3}}, "never perturb"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"device": "meta"}, "device 'meta'"),
        ({"optimizer": {"name": "sgd", "lr": 0.1, "nesterov": True}}, "optimizer: "),
        ({"augment": {}}, "augment needs images"),
        ({"model": {"name": "papers-cnn", "options": {"dropout": 1}}, "data": {"name": "moons"}}, "choose 'mlp'"),
        ({"checkpoint_every": "often"}, "checkpoint_every"),
        ({"epoch": 3}, "did you mean 'epochs'"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match) as error:
        train({**MOONS, **change}, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_devices() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda")


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


DIGITS: dict[str, Any] = {
    "data": {"name": "digits", "classes": [0, 1, 2, 3], "train": 200, "test": 80},
    "model": {"name": "small-cnn"},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "epochs": 8,
    "batch": 20,
    "watch": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "cross-entropy"},
        {"excitation": {"radius": 0.01}},
        {"excitation": {"radius": "auto"}},
        {"excitation": {"radius": 0.05, "kind": "multiplicative"}, "loss": "cross-entropy"},
        {"adversarial": {"radius": 0.05, "steps": 3, "bounds": [-1, 1]}, "loss": "cross-entropy"},
        {"adversarial": {"radius": 0.05, "steps": 1, "stages": 2}},
    ],
    ids=["plain", "cross-entropy", "excited", "auto", "multiplicative", "adversarial", "fast"],
)
def test_many_classes_train_and_are_measured(tmp_path: Path, changes: dict[str, Any]) -> None:
    from excite.train.evaluate import load_model, measure

    with train({**DIGITS, **changes}, tmp_path / "run") as run:
        assert run.series("accuracy/test")[1][-1] > 0.7
    found = measure(load_model(tmp_path / "run"), most=20, options=SearchOptions(evidence=False))
    assert found["test"].median > 0


@pytest.mark.parametrize("method", ["excitation", "adversarial"])
def test_a_regression_is_not_excited(tmp_path: Path, method: str) -> None:
    config = {**DIGITS, "data": {"name": "frequencies"}, "model": {"name": "mlp"}, method: {"radius": 0.1}}
    with pytest.raises(InputError, match=f"{method} needs classes"):
        train(config, tmp_path / "run")


HIDDEN = {
    "radius": {"radius": 0.05, "steps": 2, "hidden_radius": 0.01, "awp": 0.005},
    "by layer": {"radius": 0.05, "steps": 2, "hidden_radius": {"3": 0.01}, "keep_best": True},
    "stages": {"radius": 0.05, "steps": 2, "hidden_radius": 0.01, "hidden_stages": 2},
    "trades": {"radius": 0.05, "steps": 2, "hidden_radius": 0.01, "trades": 2.0},
    "auto": {"radius": 0.05, "steps": 2, "hidden_radius": "auto", "held_out": 10},
}


@pytest.mark.parametrize("name", HIDDEN)
def test_adversarial_training_of_hidden_layers(tmp_path: Path, name: str) -> None:
    config = {**MOONS, "adversarial": HIDDEN[name], "loss": "cross-entropy", "epochs": 2, "batch": 20}
    with train(config, tmp_path / "run") as run:
        assert run.status == "done"
        steps, _ = run.series("loss/step")
        assert len(steps) == 6  # 60 points, or 50 with 10 held out, in batches of 20
        assert ("excitation/hidden_radius" in run.names()) == (name == "auto")


def test_held_out_points_are_not_trained_on() -> None:
    config = parse_config({**MOONS, "adversarial": HIDDEN["auto"]})
    data = training.load_data(config.data)
    held, rest = training._held_out(data, 10)[0], training._trained_on(config, data).x_train
    assert len(held) == 10
    assert len(rest) == 50
    rows = {tuple(row.flatten().tolist()) for row in rest}
    assert not any(tuple(row.flatten().tolist()) in rows for row in held)
    with pytest.raises(InputError, match="fewer than the 60 training points"):
        training._held_out(data, 60)


@pytest.mark.parametrize("change", [{"held_out": None}, {"hidden_radius": 0.1}])
def test_held_out_belongs_to_auto(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="held_out"):
        parse_config({**MOONS, "adversarial": {**HIDDEN["auto"], **change}})


@pytest.mark.parametrize("hidden_radius", ["auto", 0.0])
def test_stages_need_a_hidden_radius(hidden_radius: object) -> None:
    held = {"held_out": 10} if hidden_radius == "auto" else {}
    with pytest.raises(InputError, match="hidden_stages"):
        parse_config(
            {**MOONS, "adversarial": {"radius": 0.1, "hidden_radius": hidden_radius, "hidden_stages": 2, **held}}
        )


def test_robust_accuracy_while_training(tmp_path: Path) -> None:
    config = {**MOONS, "epochs": 5, "robust": {"radius": 0.1, "steps": 3, "points": 20, "every": 2}}
    with train(config, tmp_path / "run") as run:
        for part in ("train", "test"):
            steps, values = run.series(f"robust/{part}")
            assert list(steps) == [0, 6, 12, 15]  # epochs 0, 2, 4 and the last, three steps each
            assert ((values >= 0) & (values <= 1)).all()
        assert run.series("robust/train")[1][-1] <= run.series("accuracy/train")[1][-1] + 0.2


def test_label_noise_changes_training_labels_only() -> None:
    clean, noisy = (load_data(DataConfig(name="digits", train=200, test=50, label_noise=noise)) for noise in (0.0, 0.5))
    assert 70 < int((clean.y_train != noisy.y_train).sum()) < 110  # nine in ten of a hundred
    assert torch.equal(clean.y_test, noisy.y_test)
    assert "50% of the labels random" in noisy.description
    with pytest.raises(InputError, match="label_noise needs classes"):
        load_data(DataConfig(name="frequencies", label_noise=0.1))
