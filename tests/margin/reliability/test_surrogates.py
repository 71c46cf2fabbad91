"""Surrogate gradients against the gradients of the functions they stand for; models that are not deterministic are said to be so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.margin import SearchOptions, margins
from excite.margin.batches import _noise
from excite.margin.problem import Decision
from excite.margin.reliability.surrogates import DRAWS, StraightThrough, SurrogateDecision, is_random, noise_size


def surrogate(model: nn.Module, x: Tensor, y: Tensor, method: str, size: float = 0.01) -> SurrogateDecision:
    base = Decision(model, None, 0.0, y, 1)
    return SurrogateDecision(
        model,
        None,
        0.0,
        y,
        1,
        base=base,
        method=method,
        noise=_noise(0),
        size=torch.full((len(x),), size, dtype=x.dtype),
    )


@pytest.mark.parametrize("name", ["round", "floor", "ceil", "trunc", "sign"])
def test_steps_have_the_gradient_of_the_identity(name: str) -> None:
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    for step in (getattr(torch, name), getattr(Tensor, name)):
        with StraightThrough():
            f = step(3 * x)
        assert torch.equal(f, step(3 * x.detach()))
        (gradient,) = torch.autograd.grad(f.sum(), x)
        assert torch.equal(gradient, torch.full_like(x, 3.0))
    assert torch.autograd.grad(torch.round(x).sum(), x)[0].abs().sum() == 0  # as before without the mode


@pytest.mark.parametrize("method", ["straight-through", "averaged", "differences"])
def test_all_agree_with_the_gradient_of_a_linear_model(method: str) -> None:
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.ones(5, dtype=torch.long)
    exact = model.weight.detach()[0]
    value, adversarial, gradient = surrogate(model, x, y, method).gradients(x)
    torch.testing.assert_close(value, model(x).detach()[:, 0])
    assert torch.equal(adversarial, model(x)[:, 0] <= 0)
    if method == "differences":  # 32 random directions in three dimensions: within about a third, and never uphill
        assert ((gradient @ exact) > 0.3 * exact.square().sum()).all()
    else:
        torch.testing.assert_close(gradient / (8 if method == "averaged" else 1), exact.expand(5, 3))


@pytest.mark.parametrize("classes", [1, 3])
def test_gradients_of_the_last_linear_layer_end_there(classes: int) -> None:
    class Saturated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes)).double()

        def forward(self, x: Tensor) -> Tensor:
            f = self.logits(x)
            return torch.where(f > 0, 1.0, 0.0) + 0 * f if classes == 1 else torch.softmax(1e5 * f, 1)

    torch.manual_seed(0)
    model, x = Saturated(), torch.randn(5, 4, dtype=torch.float64)
    y = model(x)[:, 0].long() if classes == 1 else model(x).argmax(1)
    base = Decision(model, None, 0.5, y, classes)
    decision = SurrogateDecision(
        model, None, 0.5, y, classes,
        base=base, method="logits", noise=_noise(0), size=x[:, 0], layer=model.logits[2],
    )  # fmt: skip
    assert not base.gradients(x)[2].any()
    logits = Decision(model.logits, None, 0.5, y, classes)
    value, adversarial, gradient = decision.gradients(x)
    expected = logits.gradients(x)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(gradient, expected[2])
    assert torch.equal(adversarial, base.evaluate(x)[1])  # decided by the model itself


def test_noise_has_the_size_asked_for() -> None:
    noise = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for norm, order in (("2", 2.0), ("1", 1.0)):
        size = noise_size(torch.ones(2000, dtype=torch.float64), norm, 50)
        lengths = torch.linalg.vector_norm(noise * size[:, None], order, dim=1)
        assert lengths.mean() == pytest.approx(
            0.3, rel=0.02
        )  # a standard error of 0.3 %; 0.8 stands for √(2/π), and √n for the mean


@pytest.mark.slow
def test_models_that_are_not_deterministic_are_named() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + 0.01 * torch.randn_like(x))

    model, x = Noisy(), torch.randn(6, 4)
    with torch.no_grad():
        model.inner.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])), model.inner.bias.zero_()
    y = (x[:, 0] < 0).long()
    assert is_random(model, lambda f: f, x)
    assert not is_random(model.inner, lambda f: f, x)
    with pytest.warns(UserWarning, match="not deterministic"):
        found = margins(model, x, y, options=SearchOptions(steps=10, restarts=2))
    assert found.evidence.draws == DRAWS
    assert found.lower is None
    assert "not deterministic" in found.certified_why
    with pytest.raises(ModelError, match="certify='linear': no bound holds for a model that is not deterministic"):
        margins(model, x, y, options=SearchOptions(certify="linear"))
    assert not found.trusted
    assert any("not deterministic" in flag for flag in found.flags)
    # the mean of eight draws is off by 0.01/√8 or so at a time, and the smallest of many counts: within five times the noise
    clear = x[:, 0].abs() > 0.1
    assert ((found.values - x[:, 0].abs()).abs()[clear] < 0.05).all()
