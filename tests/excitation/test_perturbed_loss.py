"""What both training losses share: predicting, progress, state, and outputs in at least float32."""

import pytest
import torch
from torch import nn

from excite import AdversarialTraining, PersistentExcitation, Stages
from excite.errors import InputError
from excite.excitation.perturbed_loss import PerturbedLoss

X, Y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])


@pytest.fixture(params=[PersistentExcitation, AdversarialTraining])
def method(request):
    torch.manual_seed(0)
    return request.param(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), Stages(0.1))


def test_the_base_class_cannot_be_used_alone():
    with pytest.raises(TypeError, match="abstract"):
        PerturbedLoss(nn.Linear(2, 1))


def test_progress_is_saved_and_restored(method):
    method.advance(0.5)
    state = method.state_dict()
    assert state == {"progress": 0.5}
    method.advance(1.0)
    method.load_state_dict(state)
    assert method.progress == 0.5
    for other in ({}, [1], None):
        with pytest.raises(InputError, match="expected what state_dict returned"):
            method.load_state_dict(other)


def test_predict_checks_the_input_and_decide_does_not(method):
    assert torch.equal(method.predict(X), method.decide(X))
    bad = X.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(InputError, match="finite"):
        method.predict(bad)
    assert method.decide(bad).shape == (4,)


def test_outputs_in_half_precision_are_read_in_float32(method):
    assert method._read(torch.zeros(4, 1, dtype=torch.bfloat16), 4).dtype == torch.float32


def test_a_radius_of_zero_is_plain_training(method):
    method.advance(0.0)
    assert torch.equal(method.loss(X, Y), method.target.mean_error(method.model(X).squeeze(1), Y))
