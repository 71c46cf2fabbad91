"""Algorithm 1's update to the letter: momentum from zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite import PersistentExcitation
from excite.errors import InputError
from excite.train import zero_momentum
from excite.train.config import parse_config
from excite.train.from_config import build_optimizer, load_trained, train

RATE, GAMMA, RADIUS = 0.02, 0.9, 0.1


def problem() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    return model, x, (x[:, 0] > 0).long()


def algorithm_1(steps: int) -> Tensor:
    """The printed loop for f(x; d) = w·(x + d) + b with |d| ≤ r in the infinity norm: extremes are w·x + b ± r ‖w‖₁."""
    model, x, y = problem()
    theta = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    delta = torch.zeros_like(theta)
    for i in range(steps):
        at = theta.clone().requires_grad_()
        f = at[:3] @ x[i % 40] + at[3]
        reach = RADIUS * at[:3].abs().sum()
        target = y[i % 40]
        squares = (f + reach - target) ** 2 + (f - reach - target) ** 2
        (gradient,) = torch.autograd.grad(squares, at)
        delta = GAMMA * delta + (1 - GAMMA) * gradient
        theta = theta - RATE * delta
    return theta


def excite_loop(steps: int, *, zero: bool) -> Tensor:
    model, x, y = problem()
    excitation = PersistentExcitation(model, RADIUS, steps=1)
    # The sum of squares of Algorithm 1 is `factor` times the loss.
    with torch.no_grad():
        low, high = excitation.extremes(x[:1])
        target = y[:1]
        factor = float(((low - target) ** 2 + (high - target) ** 2) / excitation.loss(x[:1], y[:1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=factor * RATE, momentum=GAMMA, dampening=GAMMA)
    if zero:
        zero_momentum(optimizer)
    for i in range(steps):
        optimizer.zero_grad()
        excitation.loss(x[i % 40][None], y[i % 40][None]).backward()
        optimizer.step()
    return torch.cat([model.weight.detach().flatten(), model.bias.detach()])


@pytest.mark.parametrize("steps", [1, 2, 100])
def test_the_update_is_that_of_algorithm_1(steps: int) -> None:
    expected = algorithm_1(steps)
    assert (excite_loop(steps, zero=True) - expected).abs().max() < 1e-13


def test_pytorch_alone_counts_the_first_gradient_tenfold() -> None:
    model, *_ = problem()
    start = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    step = algorithm_1(1) - start
    assert torch.allclose(excite_loop(1, zero=False) - start, step / (1 - GAMMA), rtol=1e-9)
    assert (excite_loop(100, zero=False) - algorithm_1(100)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adam(p), "expected torch.optim.SGD with momentum > 0; got Adam"),
        (lambda p: torch.optim.SGD(p, 0.1), "expected torch.optim.SGD with momentum > 0"),
    ],
)
def test_other_optimizers_are_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        zero_momentum(make(problem()[0].parameters()))


def test_it_is_refused_after_a_step() -> None:
    model, x, _ = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).mean().backward()
    optimizer.step()
    with pytest.raises(InputError, match="has not made a step"):
        zero_momentum(optimizer)


CONFIG = {
    "data": {"name": "digits", "classes": [8, 9], "train": 40, "test": 20},
    "model": {"name": "mlp"},
    "epochs": 1,
    "batch": 20,
    "watch": False,
}


def config(**optimizer: object):
    return parse_config({**CONFIG, "optimizer": {"name": "sgd", "lr": 0.1, **optimizer}})


def test_the_config_chooses_the_start() -> None:
    model = nn.Linear(3, 1)
    assert not build_optimizer(config(momentum=0.9), model).state
    optimizer = build_optimizer(config(momentum=0.9, momentum_start="zero"), model)
    assert {name: bool(state["momentum_buffer"].any()) for name, state in enumerate(optimizer.state.values())} == {0: False, 1: False}  # fmt: skip
    with pytest.raises(InputError, match="momentum > 0 together with momentum_start"):
        config(momentum_start="zero")
    with pytest.raises(InputError, match="momentum_start"):
        config(momentum=0.9, momentum_start="one")


def test_trainings_from_either_start_differ(tmp_path) -> None:
    final = {}
    for start in ("zero", "gradient"):
        with train(config(momentum=0.9, dampening=0.9, momentum_start=start), tmp_path / start) as run:
            final[start] = load_trained(run)[0].state_dict()
    assert any(not torch.equal(final["zero"][name], final["gradient"][name]) for name in final["zero"])
