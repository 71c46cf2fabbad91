"""Trainings that differ in their seeds only, each in a run folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from excite.errors import InputError, TrainingStopped
from excite.runs import Run
from excite.train.config import parse_config
from excite.train.from_config import train_together

SMALL: dict[str, Any] = {
    "data": {"name": "digits", "classes": [8, 9], "train": 60, "test": 20},
    "model": {"name": "small-cnn"},
    "excitation": {"radius": 0.03, "stages": 2, "steps": 3},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.9},
    "epochs": 2,
    "batch": 20,
    "watch": False,
}


def config(seed: int, **changes: Any) -> Any:
    settings = {**SMALL, **changes, "seed": seed}
    settings["data"] = {**settings["data"], "seed": seed}
    return parse_config(settings)


@pytest.mark.parametrize("excitation", [{"radius": 0.03}, {"relative": 0.02}], ids=["stacked", "one by one"])
def test_a_network_that_cannot_continue_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excitation: dict[str, float]
) -> None:
    from excite.train.from_config import training

    made = training.build_model

    def sabotaged(config: Any, data: Any) -> nn.Module:
        model = made(config, data)
        if config.seed == 1:
            with torch.no_grad():
                model[0].weight[0, 0, 0, 0] = float("nan")
        return model

    monkeypatch.setattr(training, "build_model", sabotaged)
    paths = [tmp_path / str(i) for i in range(3)]
    with pytest.raises(TrainingStopped, match="1 of 3 training runs stopped"):
        train_together([config(seed, excitation=excitation) for seed in range(3)], paths)
    found = [Run.open(path) for path in paths]
    assert [run.status for run in found] == ["done", "failed", "done"]
    for run in found:
        run.close()


def test_only_seeds_may_differ(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing but their seeds"):
        train_together([config(0), config(1, epochs=3)], [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(InputError, match="a folder for each"):
        train_together([config(0)], [])
