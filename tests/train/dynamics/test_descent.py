"""Gradient descent with the step size of appendix F."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from excite.train import descent
from train.dynamics.flow_networks import data, logistic, network


def test_descent_with_a_fixed_step_is_the_loop_one_would_write() -> None:
    x, y = data()
    model = network(3, 4, 1, relu=True)
    course = descent(model, logistic(x, y), 25, step=0.1)
    slow = copy.deepcopy(model)
    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    slack = 0.0
    for _ in range(25):
        optimizer.zero_grad()
        logistic(x, y)(slow).backward()
        slack += 0.01 * sum(float(p.grad.square().sum()) for p in slow.parameters())
        optimizer.step()
    for p, q in zip(course.model.parameters(), slow.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)
    assert course.slack == pytest.approx(slack, rel=1e-12)
    assert course.times[-1] == 25


@pytest.mark.parametrize("relu", [False, True])
def test_squares_explain_what_the_diagonal_laws_move_by(relu: bool) -> None:
    x, y = data()
    model = network(3, 4, 1, relu=relu)
    course = descent(model, logistic(x, y), 25, step=0.1)

    def law(squares: dict[str, Tensor]) -> Tensor:
        first, last = squares.values()
        return first.sum(1) - last.sum(0)

    before, after = ({name: p.detach().square() for name, p in m.named_parameters()} for m in (model, course.model))
    moved = law(after) - law(before)
    torch.testing.assert_close(moved, law(dict(course.squares)), rtol=0, atol=1e-14)
    assert float(moved.abs().max()) > 1e-6
    assert course.slack == pytest.approx(sum(float(part.sum()) for part in course.squares.values()), rel=1e-12)


@pytest.mark.parametrize("relu", [False, True])
def test_appendix_f_the_slack_is_bounded_by_the_loss(relu: bool) -> None:
    x, y = data()
    course = descent(network(3, 5, 4, 1, relu=relu), logistic(x, y), 120, refresh=10)
    losses = course.values["loss"]
    assert np.all(np.diff(losses) < 0)
    assert 0 < course.slack <= 2 * (losses[0] - losses[-1])
    assert course.values["step"].max() <= 1.0


def test_steps_are_halved_until_equation_87_holds() -> None:
    """R = log cosh 5w is flat far out, so that 1/β there is far too long: from w = 2 a step of 1 leads to w = −3, uphill."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

    def loss(m: nn.Module) -> Tensor:
        return (5 * m.w).abs() + torch.log1p(torch.exp(-10 * m.w.abs()))

    course = descent(One(), loss, 30, refresh=7, quantities={"w": lambda m: m.w})
    losses, slopes, steps = (course.values[name] for name in ("loss", "gradient", "step"))
    rounding = 8 * np.finfo(float).eps * losses[0]
    assert np.all(losses[1:] - losses[:-1] <= -steps[:-1] / 2 * slopes[:-1] ** 2 + rounding)  # equation 87
    assert course.slack <= 2 * (losses[0] - losses[-1]) + 30 * rounding  # and so the theorem's slack
    assert steps[0] == 0.5  # halved once, and not once too often
    assert steps.max() <= 1.0
    # The whole step that β alone allows at the start goes uphill.
    whole = descent(One(), loss, 1, step=1.0)
    assert whole.values["loss"][1] > whole.values["loss"][0]


def test_equation_82_has_the_factor_one() -> None:
    """One step: w'v' − wv − η² dw dv = −η (w dv + v dw) for two weights w, v; printed with −2η."""
    w, v, dw, dv, eta = 2.0, 3.0, 0.5, -0.25, 0.1
    left = (w - eta * dw) * (v - eta * dv) - w * v - eta**2 * dw * dv
    assert left == pytest.approx(-eta * (w * dv + v * dw))
    assert left != pytest.approx(-2 * eta * (w * dv + v * dw))
