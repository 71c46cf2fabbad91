"""Training with dropout against autograd, step by step, with the masks that were drawn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.errors import InputError, TrainingStopped
from excite.train import train_with_dropout
from models import same_state, state_of


def network(*widths: int, sigmoid: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1], *([nn.Sigmoid()] if sigmoid else [])).double()


def points(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator).double()
    return x, torch.randint(0, 2, (count,), generator=generator)


def slowly(
    model: nn.Sequential, x: Tensor, y: Tensor, steps: int, lr: float, where: str, decay: float
) -> tuple[list[Tensor], list[float], list[Tensor]]:
    """The same by autograd: parameters, ‖Δb₁‖ / (α ε) at each step, and the active units kept."""
    layers = [
        (m.weight.detach().clone().requires_grad_(), m.bias.detach().clone().requires_grad_())
        for m in model
        if isinstance(m, nn.Linear)
    ]
    widths = [len(w) for w, _ in layers[:-1]]
    draws = np.random.default_rng(0)
    order = draws.integers(0, len(x), steps)
    updates, seen = [], []
    for t in range(steps):
        kept = np.split(draws.random(sum(widths)) < 0.5, np.cumsum(widths)[:-1])
        h = full = x[order[t]]
        active = []
        for (weight, bias), keep in zip(layers[:-1], kept):
            keep_ = torch.from_numpy(keep)
            if where == "end":
                full = F.relu(weight @ full + bias)
                on = keep_ & (full > 0)
                h = on * (weight @ h + bias)
            else:
                u = weight @ h + bias
                on = keep_ & (u > 0)
                h = 2 * keep_ * F.relu(u)
            active.append(on)
        f = torch.sigmoid(layers[-1][0] @ h + layers[-1][1])[0]
        target = y[order[t]].double()
        loss = F.binary_cross_entropy(f, target)
        gradients = torch.autograd.grad(loss, [p for pair in layers for p in pair], allow_unused=True)
        rate = lr * decay ** (t / steps)
        before = layers[0][1].detach().clone()
        with torch.no_grad():
            for p, g in zip([p for pair in layers for p in pair], gradients):
                if g is not None:
                    p -= rate * g
        error = 1 / abs(1 - float(target) - float(f.detach()))
        updates.append(float((layers[0][1].detach() - before).norm()) / (rate * error))
        seen.append(torch.cat(active))
    return [p.detach() for pair in layers for p in pair], updates, seen


@pytest.mark.parametrize("where", ["end", "forward"])
@pytest.mark.parametrize("widths", [(3, 6, 1), (3, 5, 4, 1), (3, 4, 4, 3, 1)])
def test_steps_are_those_of_autograd(widths: tuple[int, ...], where: str) -> None:
    model, (x, y) = network(*widths), points()
    before = state_of(model)
    run = train_with_dropout(model, x, y, 80, 0.1, where=where, tail=80, decay=0.5)  # type: ignore[arg-type]
    assert same_state(before, state_of(model))
    expected, updates, seen = slowly(model, x, y, 80, 0.1, where, 0.5)
    for found, slow in zip([p for pair in run.pairs for p in pair], expected):
        torch.testing.assert_close(found, slow, rtol=0, atol=1e-12)
    factor = 2.0 ** (len(widths) - 2) if where == "forward" else 1.0
    torch.testing.assert_close(run.phi * factor, torch.tensor(updates).double(), rtol=1e-6, atol=1e-9)
    assert torch.equal(torch.cat(run.seen, 1), torch.stack(seen))
    torch.testing.assert_close(run.plain * run.outputs * (1 - run.outputs), run.phi)


def test_the_two_ways_agree_for_one_hidden_layer_up_to_a_factor() -> None:
    """Depth 2: the footnote of the paper. Doubling the last weight makes up for the factor in the first step."""
    model, (x, y) = network(3, 6, 1), points()
    double = network(3, 6, 1)
    with torch.no_grad():
        double[2].weight.mul_(2)
    practice = train_with_dropout(model, x, y, 1, 0.1, where="forward", tail=1)
    defined = train_with_dropout(double, x, y, 1, 0.1, where="end", tail=1)
    torch.testing.assert_close(practice.outputs, defined.outputs)
    assert torch.equal(practice.seen[0], defined.seen[0])


def test_what_is_looked_at() -> None:
    model, (x, y) = network(3, 5, 4, 1, sigmoid=True), points()
    run = train_with_dropout(model, x, y, 50, 1e-9, tail=20, measurements=4)
    assert run.tau == 30
    assert run.measurements == 5
    f = run.module()(x).detach()[:, 0]
    assert run.min_output == pytest.approx(float(torch.minimum(f, 1 - f).min()), abs=1e-9)
    first = model[1](model[0](x)) > 0
    second = model[3](model[2](model[1](model[0](x)))) > 0
    shares = torch.cat([first.double().mean(0), second.double().mean(0)])
    assert run.p_min == pytest.approx(float(shares.min()))
    assert run.p_avg == pytest.approx(float(shares.mean()))
    assert run.beta == pytest.approx(float(torch.linalg.matrix_norm(model[0].weight.detach(), 2)))
    assert run.changed == 0
    assert run.gamma < 1e-6
    torch.testing.assert_close(run.module()(x), model(x).detach(), rtol=0, atol=1e-6)


def test_what_is_refused() -> None:
    model, (x, y) = network(3, 5, 1), points()
    with pytest.raises(InputError, match="labels 0 and 1"):
        train_with_dropout(model, x, 2 * y - 1, 5, 0.1, tail=5)
    with pytest.raises(InputError, match="where"):
        train_with_dropout(model, x, y, 5, 0.1, where="middle", tail=5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tail"):
        train_with_dropout(model, x, y, 5, 0.1, tail=6)
    with pytest.raises(InputError, match="one output"):
        train_with_dropout(network(3, 4, 2), x, y, 5, 0.1, tail=5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_training_that_diverges_says_so_however_short() -> None:
    model, (x, y) = network(3, 5, 4, 1), points()
    with pytest.raises(TrainingStopped, match=r"the output is not finite at step \d+: lower lr"):
        train_with_dropout(model, x, y, 60, 1e100, tail=5)
