"""The largest eigenvalue of the Hessian by Lanczos against the full Hessian, and thresholds against simulated descent."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from excite.bounds import Descent, Sharpness, descent_stability, sharpness
from excite.bounds.stability import stable
from excite.errors import ExciteError, InputError, ModelError
from models import build, same_state, state_of


def dense(model, loss):
    """All eigenvalues of the Hessian of loss(model), the slow way."""
    named = dict(model.named_parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in named.values()])

    class Bound(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.values = values

        def forward(self, *args):
            return functional_call(model, self.values, args)

    def at(vector):
        values, start = {}, 0
        for name, p in named.items():
            values[name] = vector[start : start + p.numel()].reshape(p.shape)
            start += p.numel()
        return loss(Bound(values))

    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(at, flat))


@pytest.mark.parametrize("name", ["linear", "mlp", "tanh", "functional", "convolutional", "layernorm", "batchnorm"])
def test_it_is_the_largest_eigenvalue_of_the_full_hessian(name):
    model, x = build(name)
    y = torch.linspace(-1, 1, len(x), dtype=torch.float64)

    def loss(m):
        return F.mse_loss(m(x).reshape(-1), y)

    before = state_of(model)
    found = sharpness(model, loss)
    assert same_state(before, state_of(model))
    truth = dense(model, loss)
    assert found.value == pytest.approx(float(truth[-1]), rel=1e-8, abs=1e-10)
    assert found.residual <= 1e-6 * max(1.0, abs(found.value))
    assert found.parameters == len(truth)


def test_cross_entropy_and_many_classes():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 3

    def loss(m):
        return F.cross_entropy(m(x), y)

    assert sharpness(model, loss).value == pytest.approx(float(dense(model, loss)[-1]), rel=1e-8)


def test_attention_has_second_derivatives():
    model, x = build("transformer")
    found = sharpness(model, lambda m: m(x).square().mean(), tolerance=1e-6)
    assert found.residual <= 1e-4 * found.value


def test_the_residual_bounds_the_error_when_stopped_early():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1)).double()
    x, y = torch.randn(50, 5, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64)

    def loss(m):
        return F.mse_loss(m(x), y)

    truth = dense(model, loss)
    for tolerance in (1e-1, 1e-3, 1e-6):
        found = sharpness(model, loss, tolerance=tolerance)
        assert found.value <= float(truth[-1]) * (1 + 1e-10)
        assert float((truth - found.value).abs().min()) <= found.residual + 1e-10


def test_an_estimate_not_converged_leaves_the_condition_open():
    rough = Sharpness(1.0, 0.1, 0.0, 3, 10)
    assert stable(rough, 100.0).held is None
    assert stable(rough, 0.9).held is False
    fine = Sharpness(1.0, 1e-6, 0.0, 3, 10)
    assert [stable(fine, limit).held for limit in (0.9, 1 + 1e-7, 1.1)] == [False, None, True]


def test_no_curvature():
    model = nn.Linear(20, 1).double()
    x = torch.randn(5, 20, dtype=torch.float64)
    assert sharpness(model, lambda m: m(x).sum()).value == 0
    assert sharpness(model, lambda m: m(x).relu().sum()).value == 0
    bound = descent_stability(model, lambda m: m(x).sum(), 0.1)
    assert bound.holds
    assert bound.terms["largest step"] == math.inf


@pytest.mark.parametrize(
    "rule",
    [
        Descent(0.1),
        Descent(0.1, dampening=0.5),
        Descent(0.1, 0.9),
        Descent(0.1, 0.9, 0.9),
        Descent(0.2, 0.5, 0.3),
        Descent(0.1, 0.9, nesterov=True),
    ],
)
def test_the_limit_is_where_sgd_starts_to_diverge(rule):
    for factor, settles in ((0.97, True), (1.03, False)):
        p = nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([p], rule.step, rule.momentum, rule.dampening, nesterov=rule.nesterov)
        for _ in range(1000):
            p.grad = factor * rule.limit * p.detach()
            optimizer.step()
            if not 1e-3 < abs(float(p.detach())) < 1e3:
                break
        assert (abs(float(p.detach())) < 1) == settles


def test_gradient_descent_settles_only_where_the_step_allows():
    """A network at rest: a step above 2/λ_max leaves it, one below returns to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    x = torch.randn(12, 2, dtype=torch.float64)
    y = model(x).detach()
    rest = {k: v.clone() for k, v in model.state_dict().items()}

    def loss(m):
        return (m(x) - y).square().sum() / 2

    largest = descent_stability(model, loss, 1e-3).terms["largest step"]
    for factor, stays in ((0.95, True), (1.05, False)):
        model.load_state_dict(rest)
        assert descent_stability(model, loss, factor * largest).holds == stays
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-8 * torch.randn_like(p))
        before = float(loss(model).detach())
        optimizer = torch.optim.SGD(model.parameters(), factor * largest)
        for _ in range(300):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        assert (float(loss(model).detach()) < before) == stays


def test_a_mean_has_a_share_of_the_curvature_of_the_sum():
    model, x = build("mlp")
    by_sum = descent_stability(model, lambda m: m(x).square().sum() / 2, 0.1).terms["sharpness"]
    by_mean = descent_stability(model, lambda m: m(x).square().mean(), 0.1).terms["sharpness"]
    assert by_mean == pytest.approx(by_sum * 2 / len(x), rel=1e-8)


def test_single_precision_is_close():
    model, x = build("mlp")

    def loss(m):
        return m(x.to(next(m.parameters()).dtype)).square().mean()

    double = sharpness(model, loss).value
    assert sharpness(model.float(), loss).value == pytest.approx(double, rel=1e-4)


def test_what_is_not_a_loss_is_refused():
    model, x = build("mlp")
    with pytest.raises(InputError, match="one number"):
        sharpness(model, lambda m: m(x))
    with pytest.raises(InputError, match="one number"):
        sharpness(model, lambda m: 3.0)
    with pytest.raises(InputError, match="finite"):
        sharpness(model, lambda m: (m(x) * math.nan).sum())
    with pytest.raises(ModelError, match="no parameter"):
        sharpness(nn.ReLU(), lambda m: m(x).sum())
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ExciteError, match="step size"):
            descent_stability(model, lambda m: m(x).square().mean(), wrong)
    with pytest.raises(InputError, match="momentum"):
        Descent(0.1, 1.0)
    with pytest.raises(InputError, match="Nesterov"):
        Descent(0.1, nesterov=True)
