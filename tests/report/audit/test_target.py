"""What theorems require of a model and its training, and how loose their bounds are."""

import pytest
import torch
from torch import nn

from excite import ModelError
from excite.bounds import Bound, Descent
from excite.report.audit.target import (
    AuditTarget,
    TheoremResult,
    as_linear,
    as_relu,
    known_descent,
    need_all_points,
    need_two_classes,
)
from excite.report.audit.training_setup import TrainingSetup


def target(model=None, total=6, classes=2, setup=None):
    x = torch.randn(6, 2)
    model = model or nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    return AuditTarget(model, x, torch.arange(6) % 2, total, classes, setup or TrainingSetup("squared"), 0.5)


@pytest.mark.parametrize(
    ("side", "value", "measured", "ratio"),
    [("upper", 6.0, 2.0, 3.0), ("lower", 2.0, 6.0, 3.0), ("upper", None, 2.0, None), ("upper", 6.0, None, None),
     ("upper", 6.0, 0.0, None)],
)  # fmt: skip
def test_a_correct_bound_has_a_ratio_of_at_least_one(side, value, measured, ratio):
    bound = Bound("a theorem", "a quantity", value, side, {}, ())
    assert TheoremResult(bound, measured, "").ratio == ratio


def test_a_relu_network_with_its_loss_and_all_points():
    assert len(as_relu(target()).weights) == 2
    with pytest.raises(ModelError, match="requires squared error; the network was trained with cross-entropy"):
        as_relu(target(setup=TrainingSetup("cross-entropy")))
    with pytest.raises(ModelError, match="6 of 9: raise points="):
        as_relu(target(total=9))
    wide = nn.Sequential(nn.Linear(2, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 1))
    with pytest.raises(ModelError, match="too wide"):
        as_relu(target(wide))


def test_a_linear_network_has_as_many_layers_as_the_theorem_asks():
    one, two = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert len(as_linear(target(one), 1)) == 1
    assert len(as_linear(target(two), 2)) == 2
    with pytest.raises(ModelError, match="expected one linear layer; the network has 2"):
        as_linear(target(two), 1)
    with pytest.raises(ModelError, match="expected several linear layers; the network has 1"):
        as_linear(target(one), 2)
    with pytest.raises(ModelError, match="not known"):
        as_linear(target(one, setup=TrainingSetup()), 1)


def test_step_size_points_and_classes_that_are_missing():
    with pytest.raises(ModelError, match="not known"):
        known_descent(target())
    assert known_descent(target(setup=TrainingSetup("squared", Descent(0.1)))) == Descent(0.1)
    need_all_points(target())
    need_two_classes(target())
    for classes, text in ((3, "has 3"), (0, "has none")):
        with pytest.raises(ModelError, match=text):
            need_two_classes(target(classes=classes))
