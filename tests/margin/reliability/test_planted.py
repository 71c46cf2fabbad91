"""Planted adversarial examples: real, at the distance stated, found behind an honest network and not behind a masked one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.margin import margins
from excite.margin.batches import _noise
from excite.margin.problem import Decision, FeatureDecision, MarginProblem, make_constraint
from excite.margin.reliability.planted import _plant, last_linear, planted_test
from models import same_state, state_of

BOUNDS = (torch.tensor(0.0), torch.tensor(1.0))


def network(round_inputs: bool = False) -> nn.Module:
    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.round(5 * x) / 5

    with torch.random.fork_rng():
        torch.manual_seed(0)
        front = [Rounded()] if round_inputs else []
        return nn.Sequential(nn.Flatten(), *front, nn.Linear(36, 80), nn.ReLU(), nn.Linear(80, 3)).eval()


def problem(model: nn.Module, norm: str) -> MarginProblem:
    x = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1
    return MarginProblem(Decision(model, None, 0.5, model(x).argmax(1), 3), x, make_constraint(x, norm, BOUNDS))


@pytest.mark.parametrize("norm", ["inf", "2", "1"])
def test_what_is_planted_is_adversarial_at_the_distance(norm: str) -> None:
    model = network()
    base = problem(model, norm)
    radius = torch.full((12,), {"inf": 0.05, "2": 0.3, "1": 1.5}[norm])
    planted, distance, possible = _plant(base, last_linear(model, base.x), radius, _noise(0))
    assert isinstance(planted.decision, FeatureDecision)
    assert possible.float().mean() > 0.8
    assert (distance <= radius * (1 + 1e-5)).all()
    # the points themselves keep their decision
    assert not planted.decision.evaluate(base.x)[1][possible].any()
    # random perturbations within half the distance do so too, nearly always: few examples were planted
    noise = _noise(1)
    d = base.constraint.direction(noise(base.x.shape, base.x)) * (radius / 2)[:, None, None, None]
    assert planted.decision.evaluate(base.x + base.constraint.clip(d))[1][possible].float().mean() <= 0.2
    # the outputs are those of the model's features with the planted weights
    features = model[:-1](base.x)
    by_hand = (features * planted.decision.weight).sum(1) + planted.decision.bias
    torch.testing.assert_close(planted.decision.outputs(base.x), by_hand)


def test_the_search_finds_them_behind_an_honest_network() -> None:
    model = network()
    before = state_of(model)
    result = planted_test(problem(model, "inf"), torch.full((12,), 0.05), 40, _noise(0))
    assert result.planted >= 9
    assert result.unfound == 0
    assert same_state(before, state_of(model))


def test_the_search_misses_them_behind_rounded_inputs() -> None:
    result = planted_test(problem(network(round_inputs=True), "inf"), torch.full((12,), 0.12), 20, _noise(0))
    assert result.planted >= 6
    assert result.unfound > result.planted / 2


def test_models_without_a_last_linear_layer_have_no_test() -> None:
    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :3]

    model = Functional()
    assert planted_test(problem(model, "inf"), torch.full((12,), 0.05), 4, _noise(0)) is None
    twice = nn.Linear(4, 4)
    assert last_linear(nn.Sequential(twice, twice), torch.zeros(2, 4)) is None


def test_models_of_few_inputs_have_no_test() -> None:
    """Among many random perturbations in a plane no smooth function singles one out: honest networks would fail."""
    x = torch.rand(12, 2)
    model = nn.Sequential(nn.Linear(2, 80), nn.Tanh(), nn.Linear(80, 3))
    base = MarginProblem(Decision(model, None, 0.5, model(x).argmax(1), 3), x, make_constraint(x, "inf", None))
    assert planted_test(base, torch.full((12,), 0.05), 4, _noise(0)) is None


@pytest.mark.slow
def test_a_planted_masked_network_is_flagged_and_mended() -> None:
    masked, honest = network(round_inputs=True), network()
    base = problem(honest, "inf")
    labels = masked(base.x).argmax(1)
    found = margins(masked, base.x, labels, bounds=(0, 1), perturbations=True)
    assert not found.trusted
    assert found.evidence.unfound > 0
    assert any("planted" in flag for flag in found.flags)
    assert found.evidence.mended is not None
    assert "searched again" in str(found)
    assert (masked(base.x + found.perturbations).argmax(1) != labels).all()
    trusted = margins(honest, base.x, base.decision.labels, bounds=(0, 1))
    assert trusted.trusted, trusted.flags
    assert trusted.evidence.mended is None
