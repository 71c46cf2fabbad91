"""Gradient flow against closed forms and conserved quantities; descent against its own loop and appendix F."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from excite.errors import InputError, ModelError, TrainingStopped
from excite.train import gradient_flow
from models import same_state, state_of
from train.dynamics.flow_networks import READ, Valley, conserved, data, flat, logistic, network, plain, residual


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


def test_a_kink_crossed_there_and_back_within_one_step_is_seen() -> None:
    """R = relu(v² − 0.01)/2 − v from v = −1: v' = 1 − v, but for v' = 1 in |v| < 0.1. At both ends of a long step S is positive."""
    start = np.log(2 / 1.1)  # v = 1 − 2 e^−t reaches −0.1
    end = 1 - 0.9 * np.exp(-(2.0 - start - 0.2))
    for method in ("DOP853", "RK45"):
        course = gradient_flow(Valley(0.0, -1.0), lambda m: (m.v**2 - 0.01).relu() / 2 - m.v, 2.0, at=[start + 0.1, 2.0],
                               quantities=READ, method=method)  # fmt: skip
        np.testing.assert_allclose(course.values["v"], [0.0, end], atol=1e-8)
        assert (course.crossings, course.sliding) == (2, 0.0)


@pytest.mark.slow
def test_kinks_are_crossed_as_by_a_slow_integrator() -> None:
    model, loss = residual(3)
    course = gradient_flow(model, loss, 0.1, at=1)
    truth, count = plain(model, loss, 0.1, rtol=1e-9, atol=1e-12)
    assert course.crossings >= 2
    assert (course.sliding, course.slides) == (0.0, 0)
    # Both keep errors of 1e-9 a step relative to weights of size 1; across kinks the flow amplifies them little.
    np.testing.assert_allclose(flat(course.model), truth, rtol=0, atol=1e-7)
    assert course.evaluations < count / 3
    smooth = network(3, 4, 1, relu=False)
    x, y = data()
    same = gradient_flow(smooth, logistic(x, y), 2.0, at=[2.0])
    np.testing.assert_allclose(
        flat(same.model), plain(smooth, logistic(x, y), 2.0, rtol=1e-9, atol=1e-12)[0], atol=1e-14
    )
    assert (same.crossings, same.sliding) == (0, 0.0)


@pytest.mark.slow
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


def test_it_stops_at_zero_gradient_and_leaves_the_model_alone() -> None:
    x, y = data()
    model = network(3, 1, relu=False)
    before = state_of(model)
    course = gradient_flow(model, lambda m: ((m(x)[:, 0] - y) ** 2).mean(), 1e4, tolerance=1e-6)
    assert course.converged
    assert course.gradient <= 1e-6
    assert course.times[-1] < 1e4
    assert "converged" in str(course)
    assert same_state(before, state_of(model))
    few = gradient_flow(model, lambda m: ((m(x)[:, 0] - y) ** 2).mean(), 1e4, max_steps=3)
    assert (few.status, few.steps) == ("too many steps", 3)


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
    with pytest.raises(ModelError, match="requires_grad=True"):
        gradient_flow(frozen, logistic(x, y), 1.0)
