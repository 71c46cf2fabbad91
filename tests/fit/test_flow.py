"""Gradient flow against closed forms and conserved quantities; descent against its own loop and appendix F."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError, TrainingStopped
from excite.fit import Course, descent, gradient_flow
from models import same_state, state_of


def network(*widths: int, relu: bool, seed: int = 0) -> nn.Sequential:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=False), nn.ReLU() if relu else nn.Identity()]
    torch.set_rng_state(state)
    return nn.Sequential(*layers[:-1]).double()


def data(n: int = 12, d: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    return x, torch.sign(x @ torch.randn(d, generator=g, dtype=torch.float64))


def logistic(x: Tensor, y: Tensor):
    return lambda m: nn.functional.softplus(-y * m(x)[:, 0]).mean()


@pytest.mark.parametrize("method", ["DOP853", "RK45", "LSODA"])
def test_a_linear_model_flows_as_the_matrix_exponential(method: str) -> None:
    x, y = data()
    model = network(3, 1, relu=False)
    course = gradient_flow(model, lambda m: ((m(x)[:, 0] - y) ** 2).sum() / 2, 0.7, method=method, at=[0.0, 0.35, 0.7],
                           quantities={"w": lambda m: m[0].weight[0]})  # fmt: skip
    a, w0 = (x.T @ x).numpy(), model[0].weight.detach().numpy()[0]
    best = np.linalg.solve(a, (x.T @ y).numpy())
    values, vectors = np.linalg.eigh(a)
    for t, w in zip(course.times, course.values["w"]):
        expected = best + vectors @ (np.exp(-values * t) * (vectors.T @ (w0 - best)))
        np.testing.assert_allclose(w, expected, rtol=0, atol=2e-8)
    assert (course.status, list(course.times)) == ("finished", [0.0, 0.35, 0.7])


def conserved(m: nn.Sequential) -> Tensor:
    one, two = m[0].weight, m[2].weight
    return one @ one.T - two.T @ two


def test_the_flow_conserves_what_it_should_and_only_that() -> None:
    x, y = data()
    for relu in (False, True):
        model = network(3, 4, 1, relu=relu, seed=11)
        course = gradient_flow(model, logistic(x, y), 6.0, quantities={"law": conserved}, at=10)
        assert course.slides == 0
        drift = np.abs(course.values["law"] - course.values["law"][0])
        diagonal = np.einsum("kii->ki", drift)
        assert diagonal.max() < 1e-8
        assert (drift.max() < 1e-8) != relu  # off the diagonal the law is for linear networks only
        assert np.all(np.diff(course.values["loss"]) < 0)


def test_a_path_that_slides_along_a_kink_is_followed() -> None:
    """R = |w| − w/2 + v²/2 slides along w = 0, where −∂R contains (0, −v): from (1, 1) w reaches 0 at t = 2, v = e^−t."""

    class Valley(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))

    course = gradient_flow(Valley(), lambda m: (m.w.relu() + (-m.w).relu()) - m.w / 2 + m.v**2 / 2, 4.0,
                           shortest=5e-3, at=[2.0, 4.0], quantities={"w": lambda m: m.w, "v": lambda m: m.v})  # fmt: skip
    assert course.slides > 300
    assert np.abs(course.values["w"]).max() < 7.5e-3 + 1e-12
    np.testing.assert_allclose(course.values["v"], np.exp([-2.0, -4.0]), atol=5e-4)
    assert course.slack > 0


def test_the_length_clock_walks_the_same_path_further() -> None:
    x, y = data()
    model = network(3, 4, 1, relu=False)
    names = {"norm": lambda m: sum(p.square().sum() for p in m.parameters()).sqrt(), "law": conserved}
    far = gradient_flow(model, lambda m: logistic(x, y)(m).log(), 1.9, clock="length", quantities=names)
    assert far.values["norm"][-1] > 2 * far.values["norm"][0]
    assert np.abs(far.values["law"] - far.values["law"][0]).max() < 1e-7
    # Where the loss is the same, the weights are: the same path with another clock.
    near = gradient_flow(model, logistic(x, y), 3.0, at=1)
    level = float(near.values["loss"][-1])
    s = np.linspace(0, 1.5, 501)
    again = gradient_flow(model, lambda m: logistic(x, y)(m).log(), 1.5, clock="length", at=s)
    cut = float(np.interp(-np.log(level), -again.values["loss"], s))
    same = gradient_flow(model, lambda m: logistic(x, y)(m).log(), cut, clock="length")
    for p, q in zip(near.model.parameters(), same.model.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)


def test_it_stops_where_the_gradient_vanishes_and_leaves_the_model_alone() -> None:
    x, y = data()
    model = network(3, 1, relu=False)
    before = state_of(model)
    course = gradient_flow(model, lambda m: ((m(x)[:, 0] - y) ** 2).mean(), 1e4, tolerance=1e-6)
    assert course.converged
    assert course.gradient <= 1e-6
    assert course.times[-1] < 1e4
    assert "converged" in str(course)
    assert same_state(before, state_of(model))
    few = gradient_flow(model, lambda m: ((m(x)[:, 0] - y) ** 2).mean(), 1e4, most=3)
    assert (few.status, few.steps) == ("too many steps", 3)


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
def test_appendix_f_the_slack_is_bounded_by_the_loss(relu: bool) -> None:
    x, y = data()
    course = descent(network(3, 5, 4, 1, relu=relu), logistic(x, y), 120, refresh=10)
    losses = course.values["loss"]
    assert np.all(np.diff(losses) < 0)
    assert 0 < course.slack <= 2 * (losses[0] - losses[-1])
    assert course.values["step"].max() <= 1.0


def test_equation_82_has_the_factor_one() -> None:
    """One step: w'v' − wv − η² dw dv = −η (w dv + v dw) for two weights w, v; printed with −2η."""
    w, v, dw, dv, eta = 2.0, 3.0, 0.5, -0.25, 0.1
    left = (w - eta * dw) * (v - eta * dv) - w * v - eta**2 * dw * dv
    assert left == pytest.approx(-eta * (w * dv + v * dw))
    assert left != pytest.approx(-2 * eta * (w * dv + v * dw))


def test_bad_input() -> None:
    x, y = data()
    model = network(3, 4, 1, relu=True)
    for bad in ({"time": 0.0}, {"time": float("nan")}, {"time": 1.0, "method": "Euler"}, {"time": 1.0, "at": [2.0]},
                {"time": 1.0, "clock": "steps"}, {"time": 1.0, "quantities": {"loss": lambda m: 0.0}}):  # fmt: skip
        with pytest.raises(InputError):
            gradient_flow(model, logistic(x, y), **bad)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="doubles"):
        gradient_flow(model, logistic(x.float(), y.float()), 1.0)
    with pytest.raises(InputError, match="not a function of the weights"):
        noisy = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1))
        gradient_flow(noisy, lambda m: m(x).square().mean(), 1.0)
    with pytest.raises(InputError, match="finite"):
        gradient_flow(model, lambda m: m(x).sum() * float("nan"), 1.0)
    with pytest.raises(InputError, match="one number"):
        gradient_flow(model, lambda m: m(x), 1.0)
    with pytest.raises(TrainingStopped):  # −w⁴ blows up in finite time
        gradient_flow(network(1, 1, relu=False), lambda m: -(m[0].weight ** 4).sum(), 1e6)
    frozen = network(3, 1, relu=False).requires_grad_(False)
    with pytest.raises(ModelError, match="asks for a gradient"):
        gradient_flow(frozen, logistic(x, y), 1.0)


def test_frozen_parameters_stay() -> None:
    x, y = data()
    model = network(3, 4, 1, relu=True)
    model[0].weight.requires_grad_(False)
    course: Course = gradient_flow(model, logistic(x, y), 2.0)
    assert torch.equal(course.model[0].weight, model[0].weight)  # type: ignore[union-attr]
    assert not torch.equal(course.model[2].weight, model[2].weight)  # type: ignore[union-attr]
