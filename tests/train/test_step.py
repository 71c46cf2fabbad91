"""One step is the loop one would write, and refuses losses without a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.errors import InputError
from excite.train.step import Step


def test_a_step_is_gradient_and_update() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 1), torch.randn(5, 3), torch.randn(5)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (model(x)[:, 0] - y).square().mean()

    gradient = torch.autograd.grad(loss(x, y), model.weight)[0]
    expected, before = model.weight.detach() - 0.1 * gradient, loss(x, y).detach()
    step = Step(loss, torch.optim.SGD(model.parameters(), 0.1))
    value = step(x, y)
    assert torch.equal(value, before)
    assert not value.requires_grad
    torch.testing.assert_close(model.weight.detach(), expected)


def test_what_check_refuses_does_not_reach_the_weights() -> None:
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    step = Step(lambda x, y: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1))

    def refuse(loss: Tensor) -> None:
        raise ValueError("not finite")

    step.check = refuse
    with pytest.raises(ValueError, match="not finite"):
        step(torch.ones(1, 1), torch.ones(1))
    assert torch.equal(model.weight.detach(), before)


@pytest.mark.parametrize("loss", [lambda x, y: 1.0, lambda x, y: torch.ones(()), lambda x, y: (x * y).requires_grad_()])
def test_losses_that_are_refused(loss: object) -> None:
    step = Step(loss, torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected a loss"):
        step(torch.ones(2), torch.ones(2))
