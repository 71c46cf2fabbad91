"""Decisions, constraints and the problem that joins them."""

import math

import pytest
import torch
from scipy.optimize import linprog
from torch import nn

from excite.margin.problem import Decision, MarginProblem, make_constraint, no_perturbations


def linear(norm="inf", bounds=None):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.rand(5, 3, dtype=torch.float64)
    limits = None if bounds is None else tuple(torch.tensor(b, dtype=torch.float64) for b in bounds)
    labels = (model(x)[:, 0] > 0.5).long()
    return MarginProblem(Decision(model, None, 0.5, labels, 1), x, make_constraint(x, norm, limits))


def test_the_logit_margin_is_positive_iff_the_decision_is_right():
    problem = linear()
    margin, adversarial, gradient = problem.decision.gradients(problem.x)
    assert (margin > 0).all()
    assert not adversarial.any()
    sign = 2 * problem.decision.labels[:, None] - 1
    torch.testing.assert_close(gradient, sign * problem.decision.model.weight.detach().expand(5, 3))
    torch.testing.assert_close(margin, problem.decision.evaluate(problem.x)[0])


def test_of_many_classes_the_nearest_to_first_order_counts():
    f = torch.tensor([[3.0, 2.0, 1.0]])
    plain = Decision(nn.Identity(), None, 0.5, torch.tensor([0]), 3)
    scaled = Decision(nn.Identity(), None, 0.5, torch.tensor([0]), 3, scale=torch.tensor([[1.0, 1.0, 10.0]]))
    assert float(plain.logit_margin(f)) == 1
    assert float(scaled.logit_margin(f)) == 2


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_projected_perturbations_lie_in_ball_and_bounds(norm):
    problem = linear(norm, (0.0, 1.0))
    radius = torch.full((5,), 0.3, dtype=torch.float64)
    d = problem.constraint.project(torch.randn(5, 3, dtype=torch.float64), radius)
    assert (problem.constraint.length(d) <= 0.3 + 1e-12).all()
    assert ((problem.x + d >= 0) & (problem.x + d <= 1)).all()


@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
def test_the_vertex_solves_the_linear_program(bounds):
    constraint = linear("1", bounds).constraint
    gradient = torch.randn(5, 3, dtype=torch.float64)
    for size in (0.2, 0.9, 1.6):
        d = constraint.vertex(gradient, torch.full((5,), size, dtype=torch.float64))
        for i in range(5):
            # d = p − q with p, q ≥ 0, Σ p + q ≤ size
            g, one = gradient[i], [1.0] * 6
            high = (
                [float("inf")] * 6 if bounds is None else [*constraint.high[i].tolist(), *(-constraint.low[i]).tolist()]
            )
            least = linprog([*g.tolist(), *(-g).tolist()], [one], [size], bounds=[(0, h) for h in high]).fun
            assert float(g @ d[i]) == pytest.approx(least, abs=1e-9)
            assert float(d[i].abs().sum()) <= size + 1e-12


def test_active_coordinates_are_those_that_can_still_move():
    constraint = linear("inf", (0.0, 1.0)).constraint
    gradient = torch.ones(5, 3, dtype=torch.float64)
    assert not constraint.active(gradient, constraint.low).any()
    assert torch.equal(constraint.active(gradient, constraint.high), gradient)


def test_only_smaller_perturbations_are_taken():
    best = no_perturbations(torch.zeros(2, 3))
    index = torch.tensor([0, 1])
    best.update(index, torch.tensor([1.0, 2.0]), torch.ones(2, 3))
    best.update(index, torch.tensor([3.0, 0.5]), 2 * torch.ones(2, 3))
    assert best.radius.tolist() == [1.0, 0.5]
    assert best.d[:, 0].tolist() == [1.0, 2.0]
    assert best.rows(index[1:]).radius.tolist() == [0.5]


def test_integers_cannot_be_perturbed():
    constraint = make_constraint(torch.zeros(4, 2, dtype=torch.long), "inf", None)
    assert constraint.max_radius.tolist() == [0.0] * 4
    assert math.isfinite(float(constraint.init_radius.sum()))
