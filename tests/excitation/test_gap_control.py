"""The controller of the hidden radius: on a toy with planted overfitting, its state, and what it refuses."""

import math

import pytest
import torch
from torch import nn

from excite import AdversarialTraining
from excite.errors import InputError
from excite.excitation.gap_control import GAIN, HIGHEST, START, GapController
from models import same_state, state_of

HELD = (torch.randn(10, 3), torch.arange(10) % 2)


def fractions(*values):
    return [torch.tensor(v) for v in values]


def test_radius_follows_its_law():
    control = GapController(HELD, 0.1, 1)
    control.observe(*fractions(0.9, 0.6))  # three times the target: the largest step up
    assert float(control.factor) == pytest.approx(START * math.exp(GAIN), rel=1e-6)
    before = float(control.factor)
    for _ in range(200):
        control.observe(*fractions(0.5, 0.5))
    assert float(control.factor) < before
    assert float(control.factor) == pytest.approx(START)
    for _ in range(200):
        control.observe(*fractions(1.0, 0.6))
    assert float(control.factor) == pytest.approx(HIGHEST)


def test_radius_falls_while_held_out_accuracy_is_below_its_best():
    control = GapController(HELD, 0.1, 1)
    for _ in range(20):
        control.observe(*fractions(0.9, 0.6))
    high = float(control.factor)
    for _ in range(20):
        control.observe(*fractions(0.9, 0.5))  # the gap has grown, and the radius was not good for it
    assert float(control.factor) < high


def test_planted_gap_is_held_at_its_target():
    # A network whose gap falls with the radius, from .6 without one: the controller settles where it is the target.
    control = GapController(HELD, 0.1, 1)
    for _ in range(400):
        gap = 0.6 * math.exp(-float(control.factor) / 0.002)
        control.observe(torch.tensor(0.4 + gap), torch.tensor(0.4))
    assert 0.6 * math.exp(-float(control.factor) / 0.002) == pytest.approx(0.1, rel=0.05)


def test_training_measures_every_25_steps_and_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    x, y = (
        torch.randn(8, 3),
        torch.arange(8) % 2,
    )  # labels without a rule: what is learned does not hold on other points
    at = AdversarialTraining(
        model, 0.01, steps=2, hidden_radius="auto", held_out=(torch.randn(64, 3), torch.arange(64) % 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        at.loss(x, y).backward()
        optimizer.step()
    measured = at.measured()
    assert measured["gap"] > 0.1
    assert measured["hidden_radius"] > START
    assert measured["gap"] == pytest.approx(measured["robust_train"] - measured["robust_held_out"])


def test_measuring_changes_nothing_in_the_model():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
    at = AdversarialTraining(model, 0.1, steps=2, hidden_radius="auto", held_out=HELD)
    before, random = state_of(model), torch.get_rng_state()
    at.adapt(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0]))
    assert same_state(before, state_of(model))
    assert torch.equal(random, torch.get_rng_state())


def test_state_continues_a_training():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        return AdversarialTraining(model, 0.1, steps=2, random_start=False, hidden_radius="auto", held_out=HELD)

    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    first, second = made(), made()
    for _ in range(30):
        first.loss(x, y)
    second.load_state_dict(first.state_dict())
    for _ in range(30):
        assert torch.equal(first.loss(x, y), second.loss(x, y))
    assert first.measured() == second.measured()
    assert first.state_dict() == second.state_dict()


def test_held_out_points_are_taken_in_turn():
    control = GapController(HELD, 0.1, 1)
    taken = torch.cat([control.batch(4)[0] for _ in range(5)])
    assert torch.equal(taken, HELD[0].repeat(2, 1))
    assert len(control.batch(100)[0]) == 10


def test_refusals():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(InputError, match=r"give held_out=\(x, y\)"):
        AdversarialTraining(model, 0.1, hidden_radius="auto")
    with pytest.raises(InputError, match="hidden_radius='auto' only"):
        AdversarialTraining(model, 0.1, hidden_radius=0.1, held_out=HELD)
    with pytest.raises(InputError, match="one label each"):
        AdversarialTraining(model, 0.1, hidden_radius="auto", held_out=(HELD[0], HELD[1][:3]))
    with pytest.raises(InputError, match="points and labels"):
        AdversarialTraining(model, 0.1, hidden_radius="auto", held_out=HELD[0])
    with pytest.raises(InputError, match="gap_target"):
        AdversarialTraining(model, 0.1, hidden_radius="auto", held_out=HELD, gap_target=0)
