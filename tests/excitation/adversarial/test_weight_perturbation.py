"""Adversarial weight perturbation: against its formula, and that weights are back afterwards."""

import pytest
import torch
from torch import nn

from excite import AdversarialTraining
from excite.excitation.adversarial.weight_perturbation import moved_weights, perturbed_weights, weight_perturbations
from models import build, same_state, state_of

Y = torch.tensor([0, 1, 1, 0])


def test_gradient_is_that_at_the_moved_weights():
    model, x = build("mlp")
    gamma = 0.05
    at = AdversarialTraining(model, 0.1, steps=3, random_start=False, awp=gamma)
    d = at.perturbations(x, Y)
    before = state_of(model)
    value = at.loss(x, Y)
    assert same_state(before, state_of(model))
    value.backward()
    found = [p.grad.clone() for p in model.parameters()]

    def plain():
        return (model(x + d).reshape(-1) - Y).square().mean()

    weights = list(model.parameters())
    gradients = torch.autograd.grad(plain(), weights)
    with torch.no_grad():  # as in the paper: move, differentiate, move back
        moves = [
            gamma * w.norm() * g / g.norm() if w.dim() > 1 else torch.zeros_like(w) for w, g in zip(weights, gradients)
        ]
        for w, v in zip(weights, moves):
            w.add_(v)
    expected_value = plain()
    expected = torch.autograd.grad(expected_value, weights)
    assert torch.allclose(value, expected_value, rtol=1e-10)
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-12) for a, b in zip(found, expected))


@pytest.mark.parametrize("hidden_radius", [0.0, 0.01])
@pytest.mark.parametrize("name", ["convolutional", "resnet-identity", "transformer"])
def test_any_model_keeps_its_state(name, hidden_radius):
    model, x = build(name)
    model.train()
    parameters = list(model.parameters())
    weights = [p.detach().clone() for p in parameters]
    at = AdversarialTraining(model, 0.1, steps=2, awp=0.01, hidden_radius=hidden_radius)
    at.loss(x, Y).backward()
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in parameters)


def test_dropout_masks_are_those_of_the_search():
    # The random state moves as in one step without AWP, and both passes draw the same masks.
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1)).double()
    x = torch.randn(4, 3).double()
    states = []
    for gamma in (0.0, 0.01):
        torch.manual_seed(0)
        AdversarialTraining(model, 0.1, steps=2, awp=gamma).loss(x, Y)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_running_statistics_are_updated_once():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
    AdversarialTraining(model, 0.1, steps=2, awp=0.01).loss(torch.randn(4, 3).double(), Y)
    assert int(model[1].num_batches_tracked) == 1


def test_tied_weights_move_together():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model[2].weight = model[0].weight
    moves = {model[0].weight: torch.ones(3, 3).double()}
    with moved_weights(model, moves):
        assert model[0].weight is model[2].weight
        assert not isinstance(model[0].weight, nn.Parameter)
    assert model[0].weight is model[2].weight
    assert isinstance(model[0].weight, nn.Parameter)


def test_weights_are_back_after_an_exception():
    model = nn.Sequential(nn.Linear(3, 1))
    weight = model[0].weight
    with pytest.raises(RuntimeError, match="stop"), moved_weights(model, {weight: torch.ones_like(weight)}):
        raise RuntimeError("stop")
    assert model[0].weight is weight


def test_recurrent_weights_are_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    model = Recurrent()
    with pytest.warns(UserWarning, match=r"not perturbed: rnn\.bias_hh_l0"):
        assert perturbed_weights(model) == [model.head.weight]


def test_a_weight_without_influence_is_left_out():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    found = weight_perturbations(model, 0.1, lambda: model[0](torch.ones(1, 2)).sum())
    assert list(found) == [model[0].weight]
    assert torch.allclose(found[model[0].weight].norm(), 0.1 * model[0].weight.norm())
