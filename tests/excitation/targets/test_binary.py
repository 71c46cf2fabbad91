"""One output and a threshold: shapes, errors, decisions, and how far a decision is from being right."""

import math

import pytest
import torch
import torch.nn.functional as F

from excite.errors import InputError, ModelError
from excite.excitation.targets.binary import Binary, check_threshold, scalar

F4, Y4 = torch.tensor([0.2, 0.7, -1.0, 3.0]), torch.tensor([0, 1, 1, 0])


def test_errors_are_squares_or_cross_entropies():
    assert torch.equal(Binary().errors(F4, Y4), (F4 - Y4).square())
    expected = torch.stack([F.softplus(-f if y else f) for f, y in zip(F4, Y4)])
    assert torch.allclose(Binary(loss="cross-entropy").errors(F4, Y4), expected)


@pytest.mark.parametrize(("loss", "threshold"), [("squared", 0.5), ("cross-entropy", 0.0)])
def test_confusion_is_positive_where_the_decision_is_wrong(loss, threshold):
    target = Binary(loss=loss)
    assert target.threshold == threshold
    assert torch.equal(target.confusion(F4, Y4) > 0, target.decide(F4) != Y4)


def test_trivial_is_the_loss_of_the_best_constant():
    labels = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert float(Binary().trivial(labels)) == pytest.approx(0.75 * 0.25)
    assert float(Binary(loss="cross-entropy").trivial(labels)) == pytest.approx(
        -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    )


def test_outputs_of_another_shape_are_refused():
    assert torch.equal(scalar(F4[:, None], 4), F4)
    with pytest.raises(ModelError, match=r"one output per sample, \(3,\) or \(3, 1\)"):
        scalar(F4, 3)
    with pytest.raises(ModelError, match="give classes="):
        scalar(torch.zeros(4, 2), 4)


def test_logits_decide_at_zero_only():
    assert check_threshold(0.0, "cross-entropy") == 0.0
    with pytest.raises(InputError, match="decide at 0"):
        check_threshold(0.5, "cross-entropy")
