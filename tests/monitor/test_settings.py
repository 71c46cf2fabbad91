"""watch(config=...): what a run stores of a config, and what it compares."""

import argparse
import dataclasses
import enum
import json
import math
import pathlib

import numpy as np
import pydantic
import pytest
import torch
from torch import nn

import excite
from excite import InputError
from excite.monitor.settings import as_settings
from excite.report import make_report
from excite.runs import Run


class Kind(enum.Enum):
    SGD = "sgd"


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple = (0.9, 0.999)


@dataclasses.dataclass
class Config:
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    kind: Kind = Kind.SGD
    name: str = "first"


class Model(pydantic.BaseModel):
    lr: float = 0.5
    sizes: list[int] = [1, 2]


def test_dataclass_namespace_pydantic_and_dict():
    assert as_settings(Config()) == {
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.999]},
        "kind": "sgd",
        "name": "first",
    }
    assert as_settings(argparse.Namespace(lr=0.1, layers=[1, 2])) == {"lr": 0.1, "layers": [1, 2]}
    assert as_settings(Model()) == {"lr": 0.5, "sizes": [1, 2]}
    assert as_settings({1: Model(), "x": None}) == {"1": {"lr": 0.5, "sizes": [1, 2]}, "x": None}


def test_values_that_are_not_json():
    class Odd:
        def __repr__(self):
            raise RuntimeError("no repr")

    settings = as_settings(
        {
            "path": pathlib.Path("data/x"),
            "number": np.float32(0.5),
            "scalar": torch.tensor(3),
            "array": np.arange(10_000).reshape(100, 100),
            "dtype": torch.float16,
            "device": torch.device("cuda:0"),
            "function": torch.nn.functional.relu,
            "class": nn.Linear,
            "set": {3, 1, 2},
            "nan": math.nan,
            "object": object(),
            "odd": Odd(),
        }
    )
    json.dumps(settings)
    assert settings["array"].startswith("array([[")
    assert len(settings["array"]) <= 200
    assert "\n" not in settings["array"]
    del settings["array"]
    assert math.isnan(settings.pop("nan"))
    assert settings == {
        "path": "data/x", "number": 0.5, "scalar": 3, "dtype": "torch.float16", "device": "cuda:0",
        "function": "torch.nn.functional.relu", "class": "torch.nn.modules.linear.Linear", "set": [1, 2, 3],
        "object": "<object object>", "odd": "<Odd>",
    }  # fmt: skip


def test_equal_settings_of_two_processes_are_equal():
    assert as_settings({"a": object(), "f": print}) == as_settings({"a": object(), "f": print})


@pytest.mark.parametrize("config", ["text", 3, [("lr", 1)], Config, None.__class__])
def test_not_a_config(config):
    with pytest.raises(InputError, match=r"config: expected a dict, a dataclass or an argparse.Namespace; got"):
        as_settings(config)


def test_a_config_that_contains_itself():
    config = {}
    config["self"] = config
    with pytest.raises(InputError, match=r"does it contain itself"):
        as_settings(config)


def watched(folder, **options):
    return excite.watch(nn.Linear(3, 1), run=folder, probes=[excite.probes.Loss()], **options)


def test_stored_beside_what_the_watch_says_itself(tmp_path):
    with watched(tmp_path / "run", config={"lr": 0.1, "model": {"name": "os:system"}, "data": 3}):
        pass
    config = excite.load_run(tmp_path / "run").config
    assert config["config"] == {"lr": 0.1, "model": {"name": "os:system"}, "data": 3}
    assert config["watch"]["model"] == "Linear"


def test_an_open_run_has_its_own_config(tmp_path):
    with Run.create(tmp_path / "run", {"lr": 0.1}) as run, pytest.raises(InputError, match=r"config: .*Run.create"):
        watched(run, config={"lr": 0.1})
    with watched(tmp_path / "two", config={"lr": 0.1, "betas": (0.5, 0.9)}):
        pass
    with Run.open(tmp_path / "two", "a") as run, watched(run, config={"lr": 0.1, "betas": (0.5, 0.9)}):
        pass  # the same: continued
    with (
        Run.open(tmp_path / "two", "a") as run,
        pytest.raises(InputError, match=r"config: .*lr: 0.1 in the run, 0.2 now"),
    ):
        watched(run, config={"lr": 0.2, "betas": (0.5, 0.9)})


def test_nowhere_to_store_it():
    with pytest.raises(InputError, match=r"config: expected a run to store it in: pass run="):
        watched(None, config={"lr": 0.1})


def test_shown_and_compared_without_a_prefix(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        with watched(tmp_path / name, config={"optimizer": {"lr": lr}, "batch": 32}) as watch:
            watch.step(1.0)
    page = make_report([tmp_path / "a", tmp_path / "b"]).write(tmp_path / "page.html")
    text = page.read_text()
    assert "optimizer.lr" in text
    assert "config.optimizer" not in text
