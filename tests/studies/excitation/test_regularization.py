"""The computations of `regularization` against closed forms, autograd and a general minimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from excite.bounds.excitation.regularization import excited_loss
from excite.studies.excitation.regularization import (
    SCALES,
    above_chord,
    compute,
    inflated_gradient,
    inflated_loss,
    regression,
    two_classes,
)
from studies.small import run_tiny

SMALL: dict[str, Any] = {"points": 12, "inputs": 3}


def nothing(share: float) -> None:
    pass


@pytest.mark.parametrize("norm", ["1", "2", "inf"])
def test_both_solutions_minimize_what_they_should(norm: str) -> None:
    settings = {**SMALL, "part": "equivalence", "norm": norm, "grid": 4, "powers": [1.0, 2.0]}
    found = compute(settings, 0, nothing)
    assert found.values["difference"] < 1e-6
    x, y = regression(0, settings)
    rng = np.random.default_rng(0)
    for _, radius, _, w in found.detail["curves"]["2.0"]:
        least = excited_loss(x, y, w, radius, norm)
        for size in (1e-3, 0.1):
            for _ in range(50):
                assert excited_loss(x, y, np.array(w) + size * rng.normal(size=3), radius, norm) > least - 1e-9


def test_theorem_6_has_no_radius_where_the_penalty_gives_zero() -> None:
    found = compute({**SMALL, "part": "equivalence", "norm": "2", "grid": 8, "powers": [1.0]}, 0, nothing)
    for share, radius, w, _ in found.detail["curves"]["1.0"]:
        assert (radius is None) == (share >= 1) == (not np.any(w))
    assert found.values["alone"] >= 1


def test_noise_and_ghosts_give_ridge_regression() -> None:
    settings = {**SMALL, "part": "noise", "penalty": 0.1, "copies": [1, 3000]}
    found = compute(settings, 0, nothing).values
    assert max(found["ghosts"], found["directions"]) < 1e-12
    assert found["many"] < found["few"] / 3
    x, y = regression(0, settings)
    ridge = minimize(lambda w: ((y - x @ w) ** 2).sum() + 1.2 * (w**2).sum(), np.zeros(3), tol=1e-14).x
    np.testing.assert_allclose(ridge, np.linalg.solve(x.T @ x + 1.2 * np.eye(3), x.T @ y), atol=1e-6)


def test_the_gradient_of_equation_13_is_that_of_autograd() -> None:
    x, s, margin = two_classes(0, SMALL)
    for seed in range(5):
        w = np.random.default_rng(seed).normal(size=3)
        t = torch.tensor(w, requires_grad=True)
        margins, reach = torch.tensor(s) * (torch.tensor(x) @ t), margin * t.norm()
        softplus = torch.nn.functional.softplus
        loss = (softplus(-margins - reach) + softplus(-margins + reach)).sum() / 2
        assert loss.item() == pytest.approx(inflated_loss(w, x, s, margin), rel=1e-12)
        np.testing.assert_allclose(inflated_gradient(w, x, s, margin), torch.autograd.grad(loss, t)[0], rtol=1e-10)


def test_the_margin_through_the_origin_is_the_largest() -> None:
    x, s, margin = two_classes(1, {"points": 12, "inputs": 2})
    angles = np.linspace(0, 2 * np.pi, 20001)
    best = (s * (np.stack([np.cos(angles), np.sin(angles)], 1) @ x.T)).min(1).max()
    assert best == pytest.approx(margin, rel=1e-3)
    assert best <= margin * (1 + 1e-9)


def test_problem_13_is_convex_where_the_paper_says_it_is_not() -> None:
    for seed in range(3):
        x, s, margin = two_classes(seed, SMALL)
        for radius in (0.5 * margin, 2 * margin):
            assert above_chord(x, s, radius, seed, pairs=500) == 0
    # In one dimension all of it: second differences of the loss along lines through and beside the origin.
    x, s = np.array([[1.0, 0.0], [0.5, 1.0]]), np.array([1.0, -1.0])
    along = np.linspace(-10, 10, 401)
    for offset in (0.0, 0.3, 2.0):
        values = np.array([inflated_loss(np.array([t, offset]), x, s, 0.4) for t in along])
        assert (values[2:] - 2 * values[1:-1] + values[:-2]).min() > -1e-10


def test_the_chord_sees_what_is_not_convex(monkeypatch: pytest.MonkeyPatch) -> None:
    import excite.studies.excitation.regularization as parts

    monkeypatch.setattr(parts, "inflated_loss", lambda w, *rest: float(np.sqrt(np.linalg.norm(w))))
    x, s, margin = two_classes(0, SMALL)
    assert above_chord(x, s, margin, 0, pairs=100) > 10


def test_a_finite_optimum_above_the_margin_is_found() -> None:
    x, s, margin = two_classes(0, SMALL)
    settings = {**SMALL, "part": "inflated", "lr": 0.1, "steps": 3000, "decay": 0.0, "radius": 1.5}
    found = compute(settings, 0, nothing).values
    best = minimize(lambda w: inflated_loss(w, x, s, 1.5 * margin), np.ones(3), tol=1e-12)
    assert found["loss"] == pytest.approx(best.fun, rel=1e-6)
    assert found["norm"] == pytest.approx(float(np.linalg.norm(best.x)), rel=1e-3)


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(SCALES["quick"], points=10, inputs=3, grid=5, steps=300, seeds=2)
    result = run_tiny("regularization", tiny, tmp_path, monkeypatch)
    words = {verdict.claim.text: verdict.word for verdict in result.verdicts}
    assert words["every λ has such an ε"] == "fails"
    assert words["problem 13 is not convex"] == "fails"
