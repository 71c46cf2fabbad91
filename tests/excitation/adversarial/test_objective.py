"""The divergence of TRADES and the errors of loss="margin", against their definitions."""

import pytest
import torch

from excite.errors import InputError
from excite.excitation.adversarial.objective import confusion, divergence
from excite.excitation.targets.binary import Binary
from excite.excitation.targets.codes import Codes
from excite.excitation.targets.tokens import Tokens


def test_divergence_is_that_of_the_probabilities():
    torch.manual_seed(0)
    clean, moved = torch.randn(2, 5, 3, dtype=torch.float64)
    p, q = clean.softmax(1), moved.softmax(1)
    assert torch.allclose(divergence(clean, moved), (p * (p / q).log()).sum(1))


def test_one_logit_stands_for_two_classes():
    torch.manual_seed(0)
    clean, moved = torch.randn(2, 5, dtype=torch.float64)
    p, q = clean.sigmoid(), moved.sigmoid()
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert torch.allclose(divergence(clean, moved), expected)


def test_margin_errors_are_those_of_the_target():
    for target, outputs in ((Binary(), torch.tensor([0.2, 0.9])), (Codes(2), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))):
        labels = torch.tensor([1, 1])
        assert torch.equal(confusion(target)(outputs, labels), target.confusion(outputs, labels))
    with pytest.raises(InputError, match="token targets"):
        confusion(Tokens())
