"""Accuracy of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.errors import ModelError
from excite.train import accuracy


def test_accuracy_counts_right_labels() -> None:
    model = nn.Linear(1, 1)
    x, y = torch.arange(10.0)[:, None], torch.tensor([0, 1] * 5)
    assert accuracy(model, lambda part: part.reshape(-1).long() % 2, x, y) == 1
    assert accuracy(model, lambda part: torch.zeros(len(part)), x, y) == 0.5
    assert accuracy(model, lambda part: part.reshape(-1).long() % 2, x.repeat(500, 1), y.repeat(500), max_points=7) == 1


def test_points_that_the_model_does_not_take_are_named() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ModelError, match="check that it takes inputs of this shape"):
        accuracy(model, lambda x: model(x)[:, 0] > 0, torch.zeros(3, 5), torch.zeros(3))
