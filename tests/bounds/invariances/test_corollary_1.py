"""Corollary 1 and the second part of Lemma 3 are false for ReLU networks: the smallest counterexamples.

m points x_i = 2m e_i − 1 in R^m, all with label 1, and m hidden units. Unit i has weights a x_i/‖x_i‖ and output weight a. Points
have negative inner products, so unit i is active on x_i alone, and the network is m copies of one equation for a.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from excite.bounds.excitation.hard_margin import separation
from excite.probes import alignment
from excite.train import FlowResult, gradient_flow


def points(m: int) -> Tensor:
    return 2.0 * m * torch.eye(m, dtype=torch.float64) - 1.0


def network(x: Tensor, a: float = 1.0, deeper: int = 0) -> nn.Sequential:
    """One unit for each point; `deeper` further hidden layers of width 2 and rank one, all balanced."""
    m, d = x.shape
    widths = [d, m, *[2] * deeper, 1]
    layers: list[nn.Module] = []
    for k, (into, out) in enumerate(pairwise(widths)):
        layer = nn.Linear(into, out, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(
                a * x / x.norm(dim=1, keepdim=True)
                if k == 0
                else torch.full((out, into), a * (m / (into * out)) ** 0.5)
            )
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def log_exponential(x: Tensor) -> Callable[[nn.Module], Tensor]:
    """Logarithm of Σ exp(−ν(x_i)): its gradient flow takes the path of the exponential loss, with another clock."""
    return lambda m: torch.logsumexp(-m(x)[:, 0], 0)


def flow_error(course: FlowResult, rtol: float = 1e-9) -> float:
    """How far the weights may be from the exact path, relative to their norm.

    Each step errs by at most rtol·|θ| in the root mean square over the n weights, which is rtol·√n·‖θ‖ at most, and the flow
    carries an error on to the end, where it has grown no more than the weights themselves (they grow the most here).
    """
    weights = torch.cat([p.detach().flatten() for p in course.model.parameters()])
    growth = max(float(course.values["norm"][-1] / course.values["norm"][0]), 1.0)
    return course.steps * rtol * math.sqrt(weights.numel()) * growth


NORM = {"norm": lambda n: torch.cat([p.flatten() for p in n.parameters()]).norm()}


@pytest.mark.slow
@pytest.mark.parametrize(("m", "expected"), [(2, 0.8), (3, 1 / 2.25), (6, 1 / 5.25)])
def test_corollary_1_fails_to_any_extent(m: int, expected: float) -> None:
    """‖W‖₂²/‖W‖²_F stays 1/(m − 3/4) and the alignment 0, while norms grow; Corollary 1 says both go to 1."""
    x = points(m)
    model = network(x)
    assert separation(x.numpy(), np.ones(m), bias=False) > 0.01  # linearly separable, through the origin
    with torch.no_grad():
        risk = nn.functional.softplus(-model(x)[:, 0]).mean()
    assert float(risk) < math.log(2)  # R(w(0)) < ℓ(0)

    def first(network: nn.Module) -> Tensor:
        return network[0].weight  # type: ignore[index, return-value]

    quantities = {
        "signs": lambda n: torch.cat([p.sign().flatten() for p in n.parameters()]),
        "ratio": lambda n: torch.linalg.matrix_norm(first(n), 2) ** 2 / first(n).square().sum(),
        "direction": lambda n: first(n) / first(n).norm(),
        "norm": lambda n: first(n).norm(),
        "off": lambda n: (first(n) @ first(n).T - n[2].weight.T @ n[2].weight)[0, 1],
        "on": lambda n: (first(n) @ first(n).T - n[2].weight.T @ n[2].weight).diagonal(),
    }
    course = gradient_flow(model, log_exponential(x), 2.0, clock="length", at=6, quantities=quantities)
    values = course.values
    assert (values["signs"] == values["signs"][0]).all()  # the stable sign regime, without a zero
    assert np.abs(values["signs"]).min() == 1
    error = flow_error(course)
    assert error < 1e-5
    np.testing.assert_allclose(values["direction"] - values["direction"][0], 0, atol=error)  # it converges in direction
    np.testing.assert_allclose(values["ratio"], expected, atol=2 * error)
    assert values["norm"][-1] > 7 * values["norm"][0]
    found = alignment(course.model, x)
    assert found.junctions[0].value < 2 * error
    # Lemma 3: the first part holds, the second does not: the entry goes to −∞ with the norms.
    largest = values["norm"].max() ** 2
    np.testing.assert_allclose(values["on"], 0, atol=4 * error * largest)
    cosine = -3 / (4 * m - 3)
    np.testing.assert_allclose(values["off"], (cosine - 1) * values["norm"] ** 2 / m, atol=4 * error * largest)


def test_the_smallest_counterexample_by_hand() -> None:
    """x = (2, −1), (−1, 2), both labelled 1; W₁ = a [2 −1; −1 2]/√5, W₂ = (a a). Singular values of [2 −1; −1 2] are 3 and 1."""
    x = torch.tensor([[2.0, -1.0], [-1.0, 2.0]], dtype=torch.float64)
    model = network(x)
    course = gradient_flow(model, lambda m: nn.functional.softplus(-m(x)[:, 0]).mean(), 50.0, at=5,
                           quantities=NORM | {"w": lambda m: m[0].weight, "v": lambda m: m[2].weight})  # fmt: skip
    error = flow_error(course) * float(course.values["norm"].max())
    assert error < 1e-5
    for w, v in zip(course.values["w"], course.values["v"]):
        a = v[0, 0]
        np.testing.assert_allclose(w, a * x.numpy() / 5**0.5, atol=2 * error)
        np.testing.assert_allclose(np.linalg.svd(w)[1] ** 2 / (w**2).sum(), [0.9, 0.1], atol=2 * error)
    # z = √5 a² solves z' = √5 z / (1 + e^z).
    z0, z1 = 5**0.5, 5**0.5 * course.values["v"][-1, 0, 0] ** 2
    grid = np.linspace(z0, z1, 200_001)
    time = np.trapezoid((1 + np.exp(grid)) / (5**0.5 * grid), grid)
    assert time == pytest.approx(50.0, rel=1e-6)


def test_the_example_of_two_points_100_degrees_apart() -> None:
    """The ratio is (1 + |cos 100°|)/2 = 0.5868 at all times."""
    angles = torch.deg2rad(torch.tensor([20.0, 120.0], dtype=torch.float64))
    x = torch.stack([angles.cos(), angles.sin()], 1)
    course = gradient_flow(network(x), log_exponential(x), 2.0, clock="length", at=1, quantities=NORM)
    found = alignment(course.model, x)
    assert found["0"].ratio == pytest.approx((1 + abs(math.cos(math.radians(100)))) / 2, abs=2 * flow_error(course))
    assert found["0"].ratio == pytest.approx(0.5868, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [100.0, 143.0])
def test_a_neighbourhood_of_the_start_goes_the_same_way(degrees: float) -> None:
    """The counterexample is no accident of symmetric weights: perturbed by a tenth it keeps its ratio in the limit."""
    angles = torch.deg2rad(torch.tensor([20.0, 20.0 + degrees], dtype=torch.float64))
    x = torch.stack([angles.cos(), angles.sin()], 1)
    limit = (1 + abs(math.cos(math.radians(degrees)))) / 2
    for seed in range(3):
        model = network(x)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * (2 * torch.rand(p.shape, generator=g, dtype=torch.float64) - 1))
        course = gradient_flow(model, log_exponential(x), 2.5, clock="length", at=1, rtol=1e-7)
        assert alignment(course.model, x)["0"].ratio == pytest.approx(limit, abs=0.01)


def test_deeper_networks_fail_in_their_first_layer() -> None:
    x = points(3)
    model = network(x, deeper=2)
    course = gradient_flow(model, log_exponential(x), 0.7, clock="length", at=1, quantities=NORM)
    found = alignment(course.model, x)
    error = 2 * flow_error(course)
    assert error < 1e-5
    assert found["0"].ratio == pytest.approx(1 / 2.25, abs=error)
    assert found.junctions[0].value < error
    assert all(found[name].ratio == pytest.approx(1, abs=error) for name in ("2", "4"))
    assert all(one.value == pytest.approx(1, abs=error) for one in found.junctions[1:])


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(2, 5), st.integers(1, 6), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 10**6))
def test_how_fast_an_entry_off_the_diagonal_moves(d: int, m: int, n: int, leak: float, seed: int) -> None:
    """d/dt (W W' − V'V)_{uv} = −Σ_i (s_u − s_v)(δ_u z_v − δ_v z_u), with z what enters unit u at point i, s its slope there, and δ the
    derivative of the risk by what leaves it. It vanishes for u = v, and where two units have the same slope at all points."""
    rng = np.random.default_rng(seed)
    x, w, v = (torch.from_numpy(rng.normal(size=s)) for s in ((n, d), (m, d), (2, m)))
    w.requires_grad_()
    v.requires_grad_()
    z = x @ w.T
    h = torch.where(z > 0, z, leak * z)
    h.retain_grad()
    risk = torch.sin(h @ v.T).sum()  # any loss
    risk.backward()
    moved = -(w.grad @ w.T + w @ w.grad.T - v.grad.T @ v - v.T @ v.grad)  # type: ignore[union-attr, operator]
    one = torch.ones_like(z)
    s, delta, z = torch.where(z > 0, one, leak * one), h.grad, z.detach()
    swap = delta[:, :, None] * z[:, None, :] - delta[:, None, :] * z[:, :, None]  # type: ignore[index]
    rate = -((s[:, :, None] - s[:, None, :]) * swap).sum(0)
    torch.testing.assert_close(moved.detach(), rate.double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(moved.diagonal().detach(), torch.zeros(m, dtype=torch.float64), rtol=0, atol=1e-10)


def test_a_label_does_not_go_through_a_relu() -> None:
    """ℓ(y ν(x)) = ℓ(ν(y x)) needs an odd network: ν(x) = (x)₊, x = 1, y = −1 gives −1 and 0."""
    relu = torch.relu(torch.tensor([1.0, -1.0]))
    assert (-relu[0], relu[1]) == (-1, 0)


def test_one_point_always_gives_rank_one() -> None:
    """With a single point every unit moves along it: the counterexample needs two."""
    x = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3, False), nn.ReLU(), nn.Linear(3, 1, False)).double()
    with torch.no_grad():
        model[0].weight.abs_()
        model[2].weight.abs_()
    course = gradient_flow(model, log_exponential(x), 3.0, clock="length", at=1)
    assert alignment(course.model, x)["0"].ratio > 0.999
