"""The loss and the step size of an audit are those of the training."""

import pytest
import torch

from excite.report.audit import audit
from excite.report.audit.training_setup import mean_loss, training_setup
from excite.train.config import parse_config
from excite.train.evaluate import load_model
from excite.train.from_config import build_model, train

from .conftest import MANY, QUICK, config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "cross-entropy"},
        {"data": MANY},
        {"data": MANY, "loss": "cross-entropy"},
        {"data": {"name": "frequencies", "train": 16, "test": 5}},
    ],
    ids=["binary", "cross-entropy", "codes", "many classes, cross-entropy", "regression"],
)
def test_the_loss_and_the_start_are_those_of_the_training(changes, tmp_path):
    """The first step of a real training goes down the gradient of `mean_loss` from the model that `start` makes."""
    settings = parse_config(config(**changes, epochs=1, optimizer={"name": "sgd", "lr": 0.3, "weight_decay": 0.01}))
    train(settings, tmp_path / "run").close()
    saved = load_model(tmp_path / "run")
    begun = build_model(settings, saved.data)
    loss = mean_loss(
        begun, saved.data.x_train, saved.data.y_train, len(saved.data.classes), training_setup(settings, 16)
    )
    for start, slope, end in zip(
        begun.parameters(), torch.autograd.grad(loss, begun.parameters()), saved.model.parameters()
    ):
        assert torch.allclose(start - 0.3 * slope, end, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_sharpness_over_limit_is_the_same_in_both_units(classes, tmp_path):
    data = {"name": "digits", "classes": list(range(classes)), "train": 12, "test": 6}
    train(config(data=data, epochs=5, batch=12), tmp_path / "run").close()
    found = audit(tmp_path / "run", units=False, **QUICK)
    ratios = [p.bound.terms["sharpness"] / p.bound.terms["limit"] for p in found.theorems]
    assert len(ratios) >= 2
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-3)
