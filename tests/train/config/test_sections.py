"""What the keys of a config accept, and which exclude one another."""

import json
from typing import Any

import pytest

from excite.errors import InputError
from excite.train.config import parse_config

BASE: dict[str, Any] = {
    "data": {"name": "digits", "classes": [3, 8]},
    "model": {"name": "small-cnn"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 2,
    "batch": 50,
}


def test_the_shortest_config() -> None:
    config = parse_config(BASE)
    assert config.excitation is None
    assert (config.seed, config.device, config.checkpoint_every, config.watch) == (0, "cpu", "1 epoch", True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("excitation", {"radius": 0.02, "norm": 2, "stages": 4, "bounds": [-1, 1], "layers": ["0", "2"]}),
        ("excitation", {"radius": {"0": 0.02, "9": 1}}),
        ("excitation", {"relative": 0.05, "layers": "input"}),
        ("optimizer", {"name": "adamw", "betas": [0.8, 0.9]}),
        ("optimizer", {"name": "sgd", "lr": 1, "momentum": 0.9, "dampening": 0.9, "nesterov": False}),
        ("loss", "cross-entropy"),
        ("augment", {"flip": False, "shift": 2}),
        ("augment", {}),
        ("checkpoint_every", 10),
        ("watch", 5),
        ("watch", False),
        ("data", {"name": "frequencies", "options": {"omega": 0.25}}),
        ("model", {"name": "package.module:factory", "options": {"widths": [3, 4], "flag": True}}),
    ],
)
def test_what_a_config_may_say(path: str, value: Any) -> None:
    config = parse_config({**BASE, path: value})
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_cross_entropy_is_not_excited() -> None:
    with pytest.raises(InputError, match="either excitation or adversarial"):
        parse_config({**BASE, "adversarial": {"radius": 0.1}, "excitation": {"radius": 0.1}})
    with pytest.raises(InputError, match="did you mean 'steps'"):
        parse_config({**BASE, "adversarial": {"radius": 0.1, "step": 3}})


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize("change", [{"held_out": None}, {"hidden_radius": 0.1}])
def test_held_out_belongs_to_auto(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="held_out"):
        parse_config(
            {**BASE, "adversarial": {"radius": 0.05, "steps": 2, "hidden_radius": "auto", "held_out": 10, **change}}
        )


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_budget": "shared"},
        {"hidden_norm": "2", "hidden_budget": "shared", "hidden_random_start": True},
        {"hidden_once": True, "hidden_random_start": True},
    ],
)
def test_options_of_hidden_layers_that_do_not_fit(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match="hidden_random_start"):
        parse_config({**BASE, "adversarial": {"radius": 0.1, "hidden_radius": 0.01, **change}})


@pytest.mark.parametrize("hidden_radius", ["auto", 0.0])
def test_stages_need_a_hidden_radius(hidden_radius: object) -> None:
    held_out = {"held_out": 10} if hidden_radius == "auto" else {}
    with pytest.raises(InputError, match="hidden_stages"):
        parse_config(
            {**BASE, "adversarial": {"radius": 0.1, "hidden_radius": hidden_radius, "hidden_stages": 2, **held_out}}
        )
