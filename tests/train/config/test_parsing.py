from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from excite.errors import InputError
from excite.train.config import TrainConfig, load_config, parse_config

BASE: dict[str, Any] = {
    "data": {"name": "digits", "classes": [3, 8]},
    "model": {"name": "small-cnn"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 2,
    "batch": 50,
}
MISSING = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(BASE)
    *parents, last = path.split("/")
    table = values
    for key in parents:
        table = table.setdefault(key, {})
    if value is MISSING:
        table.pop(last)
    else:
        table[last] = value
    return values


# (key, value, what the message names, what it says)
BAD = [
    ("epoch", 3, "'epoch'", "did you mean 'epochs'"),
    ("zzz", 3, "'zzz'", "expected one of data, model"),
    ("optimizer/momentun", 0.9, "'optimizer.momentun'", "did you mean 'momentum'"),
    ("data/nam", "digits", "'data.nam'", "did you mean 'name'"),
    ("excitation/raduis", 0.1, "'excitation.raduis'", "did you mean 'radius'"),
    ("model/option", {}, "'model.option'", "did you mean 'options'"),
    ("epochs", MISSING, "'epochs'", "missing"),
    ("data/name", MISSING, "'data.name'", "missing"),
    ("optimizer/lr", MISSING, "'optimizer.lr'", "missing"),
    ("optimizer/name", MISSING, "'optimizer.name'", "expected 'sgd', 'adam' or 'adamw'"),
    ("optimizer/name", "sdg", "'optimizer.name'", "got 'sdg'"),
    ("epochs", "3", "'epochs'", "expected a whole number; got '3'"),
    ("epochs", 2.5, "'epochs'", "expected a whole number; got 2.5"),
    ("epochs", True, "'epochs'", "expected a whole number; got True"),
    ("epochs", 0, "'epochs'", "at least 1; got 0"),
    ("watch", "false", "'watch'", "expected true or false or a whole number; got 'false'"),
    ("optimizer/nesterov", "False", "'optimizer.nesterov'", "expected true or false; got 'False'"),
    ("optimizer/lr", "0.1", "'optimizer.lr'", "expected a number; got '0.1'"),
    ("optimizer/lr", True, "'optimizer.lr'", "expected a number; got True"),
    ("optimizer/lr", float("nan"), "'optimizer.lr'", "got nan"),
    ("optimizer/lr", -1, "'optimizer.lr'", "more than 0; got -1"),
    ("optimizer", 3, "'optimizer'", "a table"),
    ("optimizer", {"name": "adam", "betas": [0.9]}, "'optimizer.betas'", "2 values"),
    ("optimizer", {"name": "adam", "betas": [0.9, 1.5]}, "'optimizer.betas.1'", "less than 1"),
    ("excitation", {"radius": -0.1}, "'excitation.radius'", "at least 0"),
    ("excitation", {"radius": "0.1"}, "'excitation.radius'", "expected 'auto' or a number or a table; got '0.1'"),
    ("excitation", {"radius": {"0": "x"}}, "'excitation.radius.0'", "expected a number; got 'x'"),
    ("excitation", {"radius": float("inf")}, "'excitation.radius'", "finite"),
    ("excitation", {}, "'excitation'", "either radius or relative"),
    ("excitation", {"radius": 1, "relative": 1}, "'excitation'", "either radius or relative"),
    ("excitation", {"radius": 1, "norm": "3"}, "'excitation.norm'", "'inf', '2' or '1'"),
    ("excitation", {"radius": 1, "norm": True}, "'excitation.norm'", "'inf', '2' or '1'"),
    ("excitation", {"radius": 1, "layers": "al"}, "'excitation.layers'", "'all' or 'input' or a list"),
    ("excitation", {"radius": 1, "layers": ["0", 3]}, "'excitation.layers.1'", "expected text; got 3"),
    ("excitation", {"radius": 1, "stages": 1}, "'excitation.stages'", "at least 2"),
    ("excitation", 0.02, "'excitation'", "expected a table; got 0.02"),
    ("data/classes", [3, 2.5], "'data.classes.1'", "a whole number or text"),
    ("data/classes", "38", "'data.classes'", "a list"),
    ("data/options", {"omega": "x"}, "'data.options.omega'", "a number"),
    ("data", "digits", "'data'", "a table"),
    ("checkpoint_every", "often", "'checkpoint_every'", "a whole number or text such as '10 steps' or '1 epoch'"),
    ("loss", "hinge", "'loss'", "'squared' or 'cross-entropy'"),
    ("augment", True, "'augment'", "a table"),
    ("augment/flipp", True, "'augment.flipp'", "did you mean 'flip'"),
    ("augment", {"flip": "False"}, "'augment.flip'", "expected true or false"),
    ("augment", {"shift": -1}, "'augment.shift'", "at least 0"),
    ("augment", {"flip": False, "shift": 0}, "'augment'", "nothing is augmented"),
    ("seed", -1, "'seed'", "at least 0"),
]


@pytest.mark.parametrize(("path", "value", "key", "match"), BAD)
def test_a_bad_config_is_one_line_that_names_the_key(path: str, value: Any, key: str, match: str) -> None:
    with pytest.raises(InputError) as error:
        parse_config(changed(path, value), "first.toml")
    message = str(error.value)
    assert message.startswith("first.toml: ")
    assert key in message
    assert match in message
    assert "\n" not in message


TOML = """
epochs = 40
batch = 50

[data]
name = "cifar10"
classes = ["airplane", "horse"]

[model]
name = "papers-cnn"

[excitation]
radius = 0.02
stages = 4
bounds = [-1, 1]

[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9
dampening = 0.9
"""


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    config = load_config(tmp_path / "a.toml")
    assert isinstance(config, TrainConfig)
    (tmp_path / "a.json").write_text(config.model_dump_json())
    assert load_config(tmp_path / "a.json") == config


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.toml", b"epochs = ", "not valid TOML"),
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[1]", "expected a table"),
        ("a.yaml", b"epochs: 3", r"\*\.toml or \*\.json"),
        ("a.toml", b"\xff\xfe", "UTF-8"),
        ("a.toml", b"epochs = 1\nepochs = 2", "not valid TOML"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=match) as error:
        load_config(tmp_path / name)
    assert "\n" not in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the config"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot read the config"):
        load_config(tmp_path)


def test_the_config_in_the_docs_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    (tmp_path / "first.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    config = load_config(tmp_path / "first.toml")
    assert config.excitation is not None
    assert config.excitation.radius == 0.02
