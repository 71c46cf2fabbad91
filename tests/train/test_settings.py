"""Settings of a training are checked when they are made; data when a training begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from excite.data import load
from excite.errors import InputError
from excite.train.settings import TrainerSettings, check_points, parse_every


@pytest.mark.parametrize(
    ("every", "steps"), [(7, 7), ("7 steps", 7), ("1 step", 1), ("1 epoch", 12), ("3 epochs", 36), (" 2 epochs", 24)]
)
def test_every(every: int | str, steps: int) -> None:
    assert parse_every(every, 12) == steps


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "", "steps", "0 steps", "1.5 epochs", "2 days", "1 epochss x"])
def test_bad_every(every: Any) -> None:
    with pytest.raises(InputError, match="checkpoint_every"):
        parse_every(every, 12)


@pytest.mark.parametrize("setting", [{"epochs": 0}, {"batch": 2.5}, {"seed": -1}, {"capture": "yes"}])
def test_bad_settings(setting: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(setting))):
        TrainerSettings(**{"epochs": 1, "batch": 2, **setting})


def test_points_and_labels_must_match() -> None:
    data = load("moons", train=10, test=4)
    check_points(data)
    with pytest.raises(InputError, match="one label per test point; got 4 points and 3 labels"):
        check_points(replace(data, y_test=data.y_test[:3]))
    with pytest.raises(InputError, match="expected finite training points"):
        check_points(replace(data, x_train=data.x_train * torch.nan))
    with pytest.raises(InputError, match="expected points with tensors"):
        check_points([1, 2])  # type: ignore[arg-type]
