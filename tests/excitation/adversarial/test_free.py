"""Free adversarial training: steps and updates written out by hand, what it equals at one step, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

from excite import AdversarialTraining, InputError
from excite.excitation import HiddenOptions
from excite.train.config import parse_config
from excite.train.from_config import train
from models import build

Y = torch.tensor([0, 1, 1, 0])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def updated(method, optimizer, loss):
    optimizer.zero_grad()
    value = loss()
    value.backward()
    optimizer.step()
    return float(value.detach()), torch.cat([p.detach().flatten() for p in method.model.parameters()])


def test_steps_and_updates_equal_those_written_out():
    model, x, steps, rate = network(), torch.randn(4, 3).double(), 3, 0.1
    by_hand = copy.deepcopy(model)
    at = AdversarialTraining(model, 0.1, steps=steps, random_start=False, hidden_radius=0.2)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    loss, weights = updated(at, optimizer, lambda: at.free_loss(x, Y, optimizer))

    rho = 0.2 * torch.tanh(by_hand[0](x)).square().mean().sqrt().detach()
    d, e = torch.zeros_like(x), torch.zeros(4, 6).double()
    other = torch.optim.SGD(by_hand.parameters(), rate, momentum=0.9)
    for step in range(steps + 1):
        d, e = d.requires_grad_(), e.requires_grad_()
        errors = (by_hand[2](torch.tanh(by_hand[0](x + d)) + e).squeeze(1) - Y).square()
        other.zero_grad()
        errors.mean().backward()
        if step:  # the pass of the first step is the search's own, at the weights of the start
            other.step()
        length = 2.5 * 0.1 / steps
        d, e = (d + length * d.grad.sign()).detach().clamp(-0.1, 0.1), (e + rho / steps * e.grad.sign()).detach()
    assert loss == pytest.approx(float(errors.mean().detach()), rel=1e-9)
    torch.testing.assert_close(weights, torch.cat([p.detach().flatten() for p in by_hand.parameters()]))


@pytest.mark.parametrize("name", ["mlp", "convolutional", "resnet-identity"])
def test_one_step_is_the_ordinary_loss(name):
    found = []
    for free in (False, True):
        torch.manual_seed(0)
        model, x = build(name)
        y = torch.arange(len(x)) % 2
        at = AdversarialTraining(model, 0.1, steps=1, hidden_radius=0.05)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        found.append(updated(at, optimizer, lambda: at.free_loss(x, y, optimizer) if free else at.loss(x, y)))  # noqa: B023
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_without_perturbations_it_is_as_many_plain_updates():
    x, found = torch.randn(4, 3).double(), []
    for steps in (3, 1):
        at = AdversarialTraining(network(), 0.0, steps=steps)
        optimizer = torch.optim.SGD(at.model.parameters(), 0.1)
        for _ in range(3 // steps):
            last = updated(at, optimizer, lambda: at.free_loss(x, Y, optimizer))  # noqa: B023
        found.append(last[1])
    assert torch.equal(*found)


def test_what_needs_a_search_is_refused():
    x = torch.randn(4, 3).double()
    for options in ({"awp": 0.01}, {"keep_best": True}, {"hidden_radius": 0.1, "hidden": HiddenOptions(once=True)}):
        at = AdversarialTraining(network(), 0.1, **options)
        with pytest.raises(InputError, match="which needs a search before the weights are updated"):
            at.free_loss(x, Y, torch.optim.SGD(at.model.parameters(), 0.1))


class NeedsClosure(torch.optim.SGD):
    """An optimizer that evaluates the loss itself."""

    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, NeedsClosure])
def test_optimizers_that_need_a_closure_are_refused(optimizer):
    x, at = torch.randn(4, 3).double(), AdversarialTraining(network(), 0.1)
    with pytest.raises(InputError, match=f"{optimizer.__name__} needs a closure"):
        at.free_loss(x, Y, optimizer(at.model.parameters(), 0.1))
    with pytest.raises(InputError, match=r"optimizer of torch\.optim; got str"):
        at.free_loss(x, Y, "sgd")


def test_configs_train_with_it(tmp_path):
    config = {
        "data": {"name": "moons"}, "model": {"name": "mlp"}, "adversarial": {"radius": 0.1, "steps": 2, "hidden_radius": 0.01},
        "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 1, "batch": 100, "watch": False,
    }  # fmt: skip
    losses = []
    for free in (False, True):
        config["adversarial"] = {**config["adversarial"], "free": free}
        with train(config, tmp_path / str(free)) as run:
            losses.append(run.frame().query("name.str.contains('loss')")["value"].tolist())
    assert len(losses[0]) == len(losses[1]) > 0
    assert losses[0] != losses[1]
    with pytest.raises(InputError, match="free without awp"):
        parse_config({**config, "adversarial": {"radius": 0.1, "free": True, "awp": 0.01}})
