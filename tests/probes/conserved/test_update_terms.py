"""Changes of a law under an update, as forms in w, g and d, against the weights themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from excite.probes.conserved.update_terms import (
    Form,
    decayed,
    decayed_by,
    direction_of_sgd,
    less,
    moments_of_adam,
    moved,
    plain,
    rule_of,
)


def evaluate(form: Form, **columns: Tensor) -> float:
    return sum(factor * float(columns[pair[0]] @ columns[pair[1]]) for pair, factor in form.items())


def change(w: Tensor, update: Tensor) -> float:
    """‖w + Δ‖² − ‖w‖²."""
    return float((w + update).square().sum() - w.square().sum())


def test_forms_equal_the_change_of_the_squared_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    w, g, d = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    rate, decay, correction = 0.1, 0.3, 0.7
    first = change(w, -rate * g)
    assert evaluate(plain(rate), w=w, g=g) == pytest.approx(first)
    assert evaluate(decayed(rate, decay), w=w, g=g) == pytest.approx(change(w, -rate * (g + decay * w)) - first)
    assert evaluate(decayed_by(rate, correction), w=w, g=g, d=d) == pytest.approx(
        change(w, -rate * (g + d / correction)) - first
    )
    whole = moved(rate, decay, correction, "d")
    assert evaluate(whole, w=w, d=d) == pytest.approx(change(w, -rate * (d / correction + decay * w)))
    assert evaluate(less(whole, plain(rate)), w=w, g=g, d=d) == pytest.approx(
        evaluate(whole, w=w, d=d) - evaluate(plain(rate), w=w, g=g)
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_direction_of_sgd_is_the_step_over_the_rate(nesterov: bool) -> None:
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=nesterov)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = before.square()
        gradient = weight.grad.clone()
        optimizer.step()
        (found,) = direction_of_sgd([optimizer.state[weight]], optimizer.param_groups, [before], [gradient])
        assert torch.allclose(weight.detach() - before, -0.1 * found, rtol=1e-12)
    assert rule_of(optimizer) == "sgd"


def test_the_moments_of_adam_give_its_step() -> None:
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for count in range(1, 4):
        before = weight.detach().clone()
        weight.grad = before.square()
        optimizer.step()
        moments = moments_of_adam([optimizer.state[weight]], optimizer.param_groups, [before], [count])
        step = -0.1 * moments.scaled()[0] / moments.correction[0]
        assert torch.allclose(weight.detach() - before, step, rtol=1e-12)
    assert rule_of(optimizer) == "adam"
    assert rule_of(torch.optim.Rprop([weight])) == "measured"
