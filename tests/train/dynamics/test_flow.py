"""Gradient flow against closed forms and conserved quantities; descent against its own loop and appendix F."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from excite.errors import InputError, ModelError, TrainingStopped
from excite.train import FlowResult, descent, gradient_flow
from excite.train.dynamics.kinks import Kinks, sides
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


class Valley(nn.Module):
    def __init__(self, w: float, v: float) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.tensor(w).double()), nn.Parameter(torch.tensor(v).double())


READ = {"w": lambda m: m.w, "v": lambda m: m.v}


def test_a_path_that_slides_along_a_kink_is_followed() -> None:
    """R = |w| − w/2 + v²/2 slides along w = 0, where −∂R contains (0, −v): from (1, 1) w reaches 0 at t = 2, v = e^−t."""
    course = gradient_flow(Valley(1.0, 1.0), lambda m: (m.w.relu() + (-m.w).relu()) - m.w / 2 + m.v**2 / 2, 4.0,
                           at=[1.0, 2.0, 4.0], quantities=READ)  # fmt: skip
    np.testing.assert_allclose(course.values["w"], [0.5, 0.0, 0.0], atol=1e-11)
    np.testing.assert_allclose(course.values["v"], np.exp([-1.0, -2.0, -4.0]), atol=1e-9)
    assert course.sliding == pytest.approx(2.0, abs=1e-9)
    assert (course.slides, course.slack) == (0, 0.0)
    assert "slid along kinks for 2" in str(course)
    rest = gradient_flow(Valley(1.0, 1.0), lambda m: m.w.abs() + m.v**2 / 2, 60.0, tolerance=1e-8)
    assert rest.converged  # 0 is in the subdifferential, though neither side has a gradient that vanishes
    assert rest.times[-1] == pytest.approx(np.log(1e8), rel=0.2)


def test_along_a_kink_that_is_not_seen_it_goes_down_in_small_steps() -> None:
    """The same |w| written with `where`: plain descent zigzags around w = 0, and says how often."""
    course = gradient_flow(Valley(1.0, 1.0), lambda m: torch.where(m.w > 0, m.w, -m.w) - m.w / 2 + m.v**2 / 2, 4.0,
                           shortest=5e-3, at=[2.0, 4.0], quantities=READ)  # fmt: skip
    assert course.slides > 300
    assert np.abs(course.values["w"]).max() < 7.5e-3 + 1e-12
    np.testing.assert_allclose(course.values["v"], np.exp([-2.0, -4.0]), atol=5e-4)
    assert course.slack > 0
    assert "slides" in str(course)


def test_a_path_leaves_a_kink_when_one_side_lets_it_go() -> None:
    """R = |w| − wv − v: from (0.1, 0), w' = v − 1 and v' = w + 1 until w = 0; then v' = 1 until v = 1; then w = cosh − 1."""
    z = (1 - np.sqrt(0.79)) / 0.1  # e^t where 0.05 e^t + 1.05 e^−t = 1
    first = np.log(z)
    leaves = first - (0.05 * z - 1.05 / z)
    times = [first / 2, (first + leaves) / 2, leaves + 0.5, leaves + 1.5]
    w = [0.05 * np.exp(times[0]) + 1.05 * np.exp(-times[0]) - 1, 0.0, np.cosh(0.5) - 1, np.cosh(1.5) - 1]
    v = [
        1 + 0.05 * np.exp(times[0]) - 1.05 * np.exp(-times[0]),
        1 - (leaves - first) / 2,
        1 + np.sinh(0.5),
        1 + np.sinh(1.5),
    ]
    for method in ("DOP853", "RK45", "LSODA"):
        course = gradient_flow(Valley(0.1, 0.0), lambda m: m.w.abs() - m.w * m.v - m.v, leaves + 1.5, at=times,
                               quantities=READ, method=method)  # fmt: skip
        # Each step errs by rtol = 1e-9 of the weights, and errors grow like e^t while the path moves off the kink. LSODA keeps
        # to its tolerance less closely.
        tolerance = course.steps * 1e-9 * np.exp(first + 1.5) * (100 if method == "LSODA" else 1)
        assert tolerance < 1e-4
        np.testing.assert_allclose(course.values["w"], w, atol=tolerance)
        np.testing.assert_allclose(course.values["v"], v, atol=tolerance)
        assert course.sliding == pytest.approx(leaves - first, abs=1e-5)
        assert course.slides == 0


def test_a_kink_that_is_crossed_there_and_back_within_one_step_is_seen() -> None:
    """R = relu(v² − 0.01)/2 − v from v = −1: v' = 1 − v, but for v' = 1 in |v| < 0.1. At both ends of a long step S is positive."""
    start = np.log(2 / 1.1)  # v = 1 − 2 e^−t reaches −0.1
    end = 1 - 0.9 * np.exp(-(2.0 - start - 0.2))
    for method in ("DOP853", "RK45"):
        course = gradient_flow(Valley(0.0, -1.0), lambda m: (m.v**2 - 0.01).relu() / 2 - m.v, 2.0, at=[start + 0.1, 2.0],
                               quantities=READ, method=method)  # fmt: skip
        np.testing.assert_allclose(course.values["v"], [0.0, end], atol=1e-8)
        assert (course.crossings, course.sliding) == (2, 0.0)


def residual(seed: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A residual ReLU network with 174 weights, as its loss sees 30 points."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(4, 6, bias=False)
            self.inner = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))
            self.leave = nn.Linear(6, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enter(x).relu()
            for i in (0, 2):
                h = (h + self.inner[i + 1](self.inner[i](h).relu())).relu()
            return self.leave(h)[:, 0]

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Residual().double()
    x, y = torch.randn(30, 4).double(), torch.randn(30).double()
    torch.set_rng_state(state)
    return model, lambda m: (m(x) - y).square().mean()


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def plain(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], time: float, **settings: float
) -> tuple[np.ndarray, int]:
    """The same flow by scipy alone, which knows nothing of kinks; and how many gradients it took."""
    model = copy.deepcopy(model)

    def slope(_: float, point: np.ndarray) -> np.ndarray:
        nn.utils.vector_to_parameters(torch.from_numpy(point.copy()), model.parameters())
        return -torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(model), list(model.parameters()))]).numpy()

    found = solve_ivp(slope, (0.0, time), flat(model), method="DOP853", **settings)
    return found.y[:, -1], found.nfev


def test_kinks_are_crossed_as_by_an_integrator_that_creeps_up_to_them() -> None:
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
def test_a_residual_network_slides_in_few_steps_where_the_limit_of_descent_goes() -> None:
    """174 weights: creeping up to the kinks took more than 13,000 gradients to t = 0.344, most of them while sliding."""
    model, loss = residual(0)
    course = gradient_flow(model, loss, 0.344, at=4, quantities={"weights": lambda m: torch.from_numpy(flat(m))})
    assert course.slides == 0
    assert course.sliding > 0.1
    assert course.evaluations < 1500
    assert np.all(np.diff(course.values["loss"]) < 0)
    # Plain descent with smaller and smaller steps converges to the sliding path: its error falls with the step.
    errors = []
    for steps in (500, 2000):
        slow = descent(model, loss, steps, step=0.344 / steps, every=steps)
        errors.append(float(np.abs(flat(slow.model) - flat(course.model)).max()))
    assert errors[1] < 2e-4
    assert errors[1] < errors[0] / 2


def test_equal_points_slide_along_one_kink() -> None:
    """Two equal points have two switching values with the same zeros: held and let go together."""
    course = gradient_flow(
        Valley(0.1, 0.0), lambda m: (torch.stack([m.w, m.w]).abs() / 2).sum() - m.w * m.v - m.v, 2.0, at=[2.0],
        quantities=READ,
    )  # fmt: skip
    one = gradient_flow(Valley(0.1, 0.0), lambda m: m.w.abs() - m.w * m.v - m.v, 2.0, at=[2.0], quantities=READ)
    np.testing.assert_allclose(course.values["w"], one.values["w"], atol=1e-9)
    assert (course.slides, course.sliding) == (0, pytest.approx(one.sliding, abs=1e-6))


@pytest.mark.parametrize("name", sorted({
    "relu", "relu_", "leaky_relu", "prelu", "abs", "threshold", "hardtanh", "relu6", "clamp", "clamp_min", "clamp_max",
    "maximum", "minimum", "max_pool1d", "max_pool2d", "max_pool3d", "F.relu in place", "nn.LeakyReLU"}))  # fmt: skip
def test_a_side_is_continued_beyond_its_kink(name: str) -> None:
    """On its own side a function is itself, and so is its gradient; from there on it is linear in its argument."""
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu, "relu_": lambda z: (1 * z).relu_(), "leaky_relu": lambda z: F.leaky_relu(z, 0.1),
        "prelu": lambda z: F.prelu(z, torch.tensor([0.2]).double()), "abs": lambda z: z.abs(),
        "threshold": lambda z: F.threshold(z, 0.2, -1.0), "hardtanh": lambda z: F.hardtanh(z, -0.5, 0.7),
        "relu6": lambda z: F.relu6(4 * z), "clamp": lambda z: z.clamp(-0.5, 0.7), "clamp_min": lambda z: z.clamp_min(0.1),
        "clamp_max": lambda z: z.clamp_max(0.1), "maximum": lambda z: torch.maximum(z, z.flip(1)),
        "minimum": lambda z: torch.minimum(z, z.flip(1)), "max_pool1d": lambda z: F.max_pool1d(z[None], 2),
        "max_pool2d": lambda z: F.max_pool2d(z[None, None], 2, stride=1),
        "max_pool3d": lambda z: F.max_pool3d(z.view(1, 1, 2, 2, 4), 2, stride=1),
        "F.relu in place": lambda z: F.relu(1 * z, inplace=True), "nn.LeakyReLU": nn.LeakyReLU(0.3, inplace=False),
    }  # fmt: skip
    function = calls[name]
    here, there = 2 * torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    here, there = here.requires_grad_(), there.requires_grad_()
    with Kinks() as seen:
        value = function(here)
    assert seen.values
    torch.testing.assert_close(value, function(here))
    side = [sides(one.detach(), None) for one in seen.values]

    def on(z: Tensor) -> Tensor:
        with Kinks(side):
            return function(z)

    torch.testing.assert_close(on(here), function(here))
    slopes = [torch.autograd.grad(use(here).sum(), here)[0] for use in (on, function)]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(on((here + there) / 2), (on(here) + on(there)) / 2)  # linear, also beyond the kink
    assert not torch.allclose(on(there), function(there))


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
    course: FlowResult = gradient_flow(model, logistic(x, y), 2.0)
    assert torch.equal(course.model[0].weight, model[0].weight)  # type: ignore[union-attr]
    assert not torch.equal(course.model[2].weight, model[2].weight)  # type: ignore[union-attr]
