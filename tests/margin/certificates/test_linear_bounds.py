"""Bounds on balls: never above what samples of the ball show, and exact for affine models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.margin.certificates.linear_bounds import Relaxation, make_ball
from excite.margin.certificates.relaxed_radii import smallest_lead
from excite.margin.certificates.tape import OperatorTape
from excite.margin.problem import Decision, MarginProblem, column, length, make_constraint

NETS = {
    "relu": lambda: nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)),
    "smooth": lambda: nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 1)),
    "pooled": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(12, 3),
    ),
    "overlapping": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3, padding=1), nn.Hardtanh(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(8, 3)
    ),
}  # fmt: skip


def problem_of(name: str, norm: str, bounds: tuple[float, float] | None) -> MarginProblem:
    torch.manual_seed(0)
    model, x = NETS[name]().double().eval(), torch.rand(4, 16).double()
    f = model(x).detach()
    classes = f.shape[1]
    y = (f[:, 0] > 0.1).long() if classes == 1 else f.argmax(1)
    limits = None if bounds is None else tuple(torch.tensor(one).double() for one in bounds)
    return MarginProblem(Decision(model, None, 0.1, y, classes), x, make_constraint(x, norm, limits))


@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
@pytest.mark.parametrize("norm", ["inf", "2", "1"])
@pytest.mark.parametrize("name", NETS)
def test_bounds_are_below_samples_of_the_ball(name: str, norm: str, bounds: tuple[float, float] | None) -> None:
    problem = problem_of(name, norm, bounds)
    tape = OperatorTape(problem.decision.model, problem.x, None, len(problem))
    for size in (0.01, 0.3):
        radius = torch.full((len(problem),), size * {"inf": 1, "2": 3, "1": 8}[norm]).double()
        interval, linear = (smallest_lead(tape, problem, radius, method) for method in ("interval", "linear"))
        assert (linear >= interval - 1e-9).all()
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            d = torch.randn(problem.x.shape, generator=generator).double()
            d = problem.constraint.project(d.sign() if norm == "inf" else d, radius * 0 + 1e9)
            d = problem.constraint.clip(d * column(radius / length(d, norm), d))
            lead = problem.decision.evaluate(problem.x + d)[0]
            assert (lead >= linear - 1e-9).all()


def test_affine_models_have_their_smallest_value() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)).double(), torch.randn(3, 6).double()
    weight = (model[1].weight @ model[0].weight)[0].detach()
    for norm, dual in (("inf", 1), ("2", 2), ("1", float("inf"))):
        problem = MarginProblem(Decision(model, None, 0.0, torch.ones(3).long(), 1), x, make_constraint(x, norm, None))
        relaxed = Relaxation(
            OperatorTape(model, x, None, 3), make_ball(problem, torch.full((3,), 0.5).double()), "linear"
        )
        found = relaxed.smallest(torch.ones(3, 1).double(), torch.arange(3))
        truth = model(x)[:, 0].detach() - 0.5 * torch.linalg.vector_norm(weight, dual)
        torch.testing.assert_close(found, truth)
