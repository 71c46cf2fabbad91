"""On linear models the margin is known: it must be found to 0.1 %."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from excite.margin import SearchOptions, margins
from excite.margin.batches import _noise, _without_blocks
from excite.margin.problem import AdversarialPerturbations, MarginProblem
from excite.margin.search import search
from models import build

DUAL = {"inf": 1.0, "2": 2.0}


def dual(w: Tensor, norm: str) -> Tensor:
    return torch.linalg.vector_norm(w, DUAL[norm], dim=-1)


def linear(outputs: int, inputs: int = 12, seed: int = 0, scale: float = 1.0) -> tuple[nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(inputs, outputs).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(outputs, inputs, generator=generator, dtype=torch.float64) * scale)
        model.bias.copy_(torch.randn(outputs, generator=generator, dtype=torch.float64) * scale)
    return model, torch.randn(40, inputs, generator=generator, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("threshold", [0.0, 0.5, -3.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_scalar_margin_is_the_distance_to_the_hyperplane(norm: str, threshold: float, scale: float) -> None:
    model, x = linear(1, scale=scale)
    f = model(x).detach()[:, 0]
    y = (f > threshold).long()
    found = margins(model, x, y, norm=norm, threshold=threshold)
    torch.testing.assert_close(
        found.values, (f - threshold).abs() / dual(model.weight[0].detach(), norm), rtol=1e-3, atol=0
    )
    assert found.trusted
    assert not found.suspect.any()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("classes", [2, 3, 7, 30])
def test_margin_of_many_classes_is_the_nearest_hyperplane(norm: str, classes: int) -> None:
    model, x = linear(classes, seed=1)
    f, w = model(x).detach(), model.weight.detach()
    y = f.argmax(1)
    ahead = f.gather(1, y[:, None]) - f
    apart = dual(w[y][:, None] - w[None], norm).clamp_min(1e-300)
    expected = (ahead / apart).scatter(1, y[:, None], math.inf).amin(1)
    found = margins(model, x, y, norm=norm)
    torch.testing.assert_close(found.values, expected, rtol=1e-3, atol=0)
    assert found.trusted


def test_far_margins_are_found_without_bounds() -> None:
    model, x = linear(1)
    with torch.no_grad():
        model.bias += 1e5
    found = margins(model, x, torch.ones(len(x)))
    f = model(x).detach()[:, 0]
    torch.testing.assert_close(found.values, (f - 0.5) / dual(model.weight[0].detach(), "inf"), rtol=1e-3, atol=0)
    assert found.trusted


@pytest.mark.parametrize("norm", ["inf", "2", "1"])
def test_far_classes_are_not_searched_one_by_one(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    towards: list[Tensor] = []

    def recorded(problem: MarginProblem, *arguments: Any) -> AdversarialPerturbations:
        if problem.decision.target is not None:
            towards.append(problem.decision.target)
        return search(problem, *arguments)

    model, x = linear(6, seed=2)
    with torch.no_grad():
        model.bias[3:] -= 1e3
    x = x[:12]
    y = model(x).argmax(1)
    monkeypatch.setattr("excite.margin.batches.search", recorded)
    options = SearchOptions(steps=20, restarts=2, evidence=False)
    found = margins(model, x, y, norm=norm, options=options)
    assert (torch.cat(towards) < 3).all()
    monkeypatch.setattr("excite.margin.batches._FAR_CLASS", math.inf)
    assert torch.equal(margins(model, x, y, norm=norm, options=options).values, found.values)
    assert (torch.cat(towards[len(towards) // 2 :]) >= 3).any()


@pytest.mark.parametrize("shape", [(50, 3, 32, 32), (50, 1, 5, 12), (50, 40), (50, 6, 7)])
def test_half_of_the_blocks_of_a_perturbation_are_set_to_zero(shape: tuple[int, ...]) -> None:
    d = torch.ones(shape, dtype=torch.float64)
    kept = _without_blocks(d, _noise(0))
    assert ((kept == 0) | (kept == 1)).all()
    assert float(kept.mean()) == pytest.approx(0.5, abs=0.1)  # at least 2,000 draws: a standard error of 0.01
    assert not torch.equal(kept[0], kept[1])
    if len(shape) == 4:
        assert torch.equal(kept, kept[:, :1].expand_as(kept))  # the same in all channels
    if shape[-1] == 32:
        blocks = kept.unfold(2, 4, 4).unfold(3, 4, 4)
        assert torch.equal(blocks, blocks[..., :1, :1].expand_as(blocks))


def test_margin_within_bounds_is_a_linear_program_in_norm_inf() -> None:
    model, x = linear(3, inputs=8, seed=3)
    x = x[:15].clamp(-1, 1)
    f, w, b = model(x).detach(), model.weight.detach().numpy(), model.bias.detach().numpy()
    y = f.argmax(1)
    found = margins(model, x, y, bounds=(-1, 1), perturbations=True)
    for i in range(len(x)):
        own, best = int(y[i]), math.inf
        for other in range(3):
            if other != own:
                best = min(best, _program(w[own] - w[other], float(b[own] - b[other]), x[i].numpy()))
        assert float(found.values[i]) == pytest.approx(best, rel=1e-3)


def _program(w: np.ndarray, b: float, x: np.ndarray) -> float:
    """min r such that w·(x + d) + b ≤ 0, |d| ≤ r, −1 ≤ x + d ≤ 1, over (d, r)."""
    n = len(x)
    eye, one = np.eye(n), np.ones((n, 1))
    rows = np.vstack([np.append(w, 0.0), np.hstack([eye, -one]), np.hstack([-eye, -one])])
    right = np.concatenate([[-(w @ x + b)], np.zeros(2 * n)])
    limits = [(-1 - xi, 1 - xi) for xi in x] + [(0, None)]
    solved = linprog(np.append(np.zeros(n), 1.0), A_ub=rows, b_ub=right, bounds=limits)
    return float(solved.fun) if solved.status == 0 else math.inf


@pytest.mark.slow
def test_margin_within_bounds_is_the_nearest_box_point_in_norm_2() -> None:
    model, x = linear(1, seed=4)
    x = x.clamp(-1, 1)
    w, f = model.weight.detach()[0], model(x).detach()[:, 0]
    y = (f > 0.5).long()
    found = margins(model, x, y, norm="2", bounds=(-1, 1))
    # The solution is clamp(−λ s w) for the least λ that crosses, s the side: bisect over λ.
    side = torch.where(y == 1, 1.0, -1.0)[:, None]
    low, high = torch.zeros(len(x), 1, dtype=torch.float64), torch.full((len(x), 1), 1e6, dtype=torch.float64)
    for _ in range(200):
        middle = (low + high) / 2
        crossed = side * (model((x - middle * side * w).clamp(-1, 1)).detach() - 0.5) <= 0
        low, high = torch.where(crossed, low, middle), torch.where(crossed, middle, high)
    d = (x - high * side * w).clamp(-1, 1) - x
    expected = torch.linalg.vector_norm(d, dim=1)
    reached = side[:, 0] * (model(x + d).detach()[:, 0] - 0.5) <= 1e-9
    torch.testing.assert_close(found.values[reached], expected[reached], rtol=1e-3, atol=0)
    assert reached.sum() > 30
    assert torch.isinf(found.values[~reached]).all()


def test_a_point_that_no_corner_of_the_bounds_breaks_is_censored() -> None:
    model, x = linear(1)
    x = x.clamp(-1, 1)
    with torch.no_grad():
        model.bias += 1000.0
    found = margins(model, x, torch.ones(len(x)), bounds=(-1, 1), perturbations=True)
    assert found.censored.all()
    assert not found.trusted
    assert found.perturbations is not None
    assert not found.perturbations.any()


@pytest.mark.slow
def test_linear_models_deep_or_plain_have_exact_margins() -> None:
    for name in ("linear", "deep-linear"):
        model, x = build(name, batch=20)
        (w,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x)
        x = x.detach()
        f = model(x).detach()[:, 0]
        found = margins(model, x, (f > 0.5).long(), norm=2)
        torch.testing.assert_close(found.values, (f - 0.5).abs() / dual(w, "2"), rtol=1e-3, atol=0)
