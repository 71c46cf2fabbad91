"""A small trained run for the tests of the audit."""

import pytest

from excite.train.from_config import train

MANY = {"name": "digits", "classes": [1, 2, 3], "train": 16, "test": 9}


QUICK = {"with_margins": False}


def config(**changes):
    settings = {
        "data": {"name": "moons", "train": 16, "test": 10},
        "model": {"name": "mlp", "options": {"widths": [4]}},
        "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9},
        "epochs": 3,
        "batch": 16,
        "watch": False,
        "checkpoint_every": "1000 steps",
    }
    return settings | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    train(config(), path).close()
    return path


def promise(found, name):
    return next(one for one in found.theorems if one.bound.name.startswith(name))
