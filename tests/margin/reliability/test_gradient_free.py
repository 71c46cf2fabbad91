"""Searches without gradients: they lead to the boundary and only shrink perturbations."""

import pytest
import torch
from torch import nn

from excite.margin.problem import Decision, MarginProblem, make_constraint
from excite.margin.reliability.gradient_free import DatasetPoints, gradient_free_search, towards_points


def noise(shape, like):
    return torch.randn(shape, dtype=like.dtype)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    nn.init.constant_(model.bias, 0.5)
    x = torch.randn(12, 4, dtype=torch.float64)
    labels = (model(x)[:, 0] > 0.5).long()
    assert 0 < labels.sum() < 12
    return MarginProblem(Decision(model, None, 0.5, labels, 1), x, make_constraint(x, "2", None))


def distances(problem):
    model = problem.decision.model
    return (model(problem.x)[:, 0] - 0.5).abs().detach() / model.weight.norm().detach()


def test_on_the_way_to_other_points_lies_the_boundary(problem):
    targets = DatasetPoints(problem.x, problem.decision.labels)
    found = towards_points(problem, targets, noise)
    assert torch.isfinite(found.radius).all()
    assert problem.decision.evaluate(problem.x + found.d)[1].all()
    assert (found.radius >= distances(problem) - 1e-9).all()


def test_without_other_points_random_directions_are_tried(problem):
    targets = DatasetPoints(problem.x[:0], problem.decision.labels[:0])
    found = towards_points(problem, targets, noise)
    adversarial = problem.decision.evaluate(problem.x + found.d)[1]
    assert torch.equal(adversarial, torch.isfinite(found.radius))


def test_random_changes_only_shrink_perturbations(problem):
    start = towards_points(problem, DatasetPoints(problem.x, problem.decision.labels), noise)
    found = gradient_free_search(problem, start, noise, queries=100)
    assert (found.radius <= start.radius).all()
    assert (found.radius < start.radius).any()
    assert problem.decision.evaluate(problem.x + found.d)[1].all()
