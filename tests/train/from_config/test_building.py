"""What a config names is built, or refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from excite.errors import InputError
from excite.excitation import AdversarialTraining, HiddenOptions
from excite.margin import SearchOptions
from excite.train.config import DataConfig, parse_config
from excite.train.from_config import build_excitation, build_model, find_device, load_data, train
from excite.train.from_config.building import held_out_points, training_data
from excite.train.models.loading import load_model

MOONS: dict[str, Any] = {
    "data": {"name": "moons", "train": 60, "test": 30},
    "model": {"name": "mlp", "options": {"widths": [8]}},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "epochs": 3,
    "batch": 25,
}


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


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, HiddenOptions()),
        ({"hidden_norm": 2, "hidden_budget": "shared"}, HiddenOptions("2", "shared")),
        ({"hidden_random_start": True, "hidden_fraction": 0.5}, HiddenOptions(random_start=True, fraction=0.5)),
        ({"hidden_once": True}, HiddenOptions(once=True)),
    ],
)
def test_options_of_hidden_layers(keys: dict[str, Any], options: HiddenOptions) -> None:
    config = parse_config({**MOONS, "adversarial": {"radius": 0.1, "hidden_radius": 0.01, **keys}})
    data = load_data(config.data)
    built = build_excitation(config, build_model(config, data), data)
    assert isinstance(built, AdversarialTraining)
    assert built.hidden == options


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
    found = measure(load_model(tmp_path / "run"), max_points=20, options=SearchOptions(evidence=False))
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
    data = load_data(config.data)
    held_out, rest = held_out_points(data, 10)[0], training_data(config, data).x_train
    assert len(held_out) == 10
    assert len(rest) == 50
    rows = {tuple(row.flatten().tolist()) for row in rest}
    assert not any(tuple(row.flatten().tolist()) in rows for row in held_out)
    with pytest.raises(InputError, match="fewer than the 60 training points"):
        held_out_points(data, 60)


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


SAVE_BEST = {**MOONS, "epochs": 6, "keep": 10, "robust": {"radius": 0.1, "steps": 3, "points": 100, "save_best": True}}


def test_weights_of_the_best_epoch_are_stored(tmp_path: Path) -> None:
    with train(SAVE_BEST, tmp_path / "run") as run:
        steps, values = run.series("robust/test")
        best_step = int(steps[1:][np.argmax(values[1:])])  # the first of equal ones; those before training do not count
        expected = run.load_checkpoint(best_step)[1]["model"]
    best = load_model(tmp_path / "run/artifacts/best.safetensors")
    assert best.step == best_step
    assert all(torch.equal(value, expected[name]) for name, value in best.model.state_dict().items())
    assert load_model(tmp_path / "run").step == steps[-1]  # a run's own model is the newest one


@pytest.mark.parametrize("stop", [4, 11])
def test_a_resumed_training_stores_the_same_best_epoch(tmp_path: Path, stop: int) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SAVE_BEST, tmp_path / "resumed", progress=interrupt)
    for name in ("resumed", "whole"):
        train(SAVE_BEST, tmp_path / name).close()
    resumed, whole = (load_model(tmp_path / name / "artifacts/best.safetensors") for name in ("resumed", "whole"))
    assert resumed.step == whole.step
    assert all(torch.equal(p, q) for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
