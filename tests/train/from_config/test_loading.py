"""The model of a run, with the weights of the checkpoint asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from excite.errors import InputError, RunError
from excite.runs import Run
from excite.train.config import parse_config
from excite.train.from_config import load_trained, stored_config, train

MOONS: dict[str, Any] = {
    "data": {"name": "moons", "train": 40, "test": 20},
    "model": {"name": "mlp", "options": {"widths": [8]}},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 2,
    "batch": 20,
    "watch": False,
}


def test_the_weights_of_each_checkpoint_are_loaded(tmp_path: Path) -> None:
    with train({**MOONS, "checkpoint_every": 1, "keep": 4}, tmp_path / "run") as run:
        for step in (2, 4):
            model, config, data = load_trained(run, step)
            assert not model.training
            stored = run.load_checkpoint(step)[1]["model"]
            assert all(torch.equal(weight, stored[name]) for name, weight in model.state_dict().items())
        newest = load_trained(run)[0].state_dict()
        assert all(torch.equal(newest[name], weight) for name, weight in model.state_dict().items())
        with pytest.raises(RunError, match="no checkpoint at step 9"):
            load_trained(run, 9)
    assert config == parse_config(MOONS | {"checkpoint_every": 1, "keep": 4})
    assert len(data.x_train) == 40


def test_a_factory_is_loaded_with_trust_only(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {**MOONS, "model": {"name": "os:system"}}) as run:
        with pytest.raises(InputError, match="trust=True in Python"):
            stored_config(run)
        assert stored_config(run, trust=True).model.name == "os:system"
