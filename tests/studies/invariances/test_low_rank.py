"""The studies low-rank, reduced-alignment and decomposition: gradients against autograd, and their whole paths, tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from excite.studies.invariances import low_rank
from excite.studies.invariances.low_rank import STRIDE, data_and_weights, norm, step
from studies.small import run_tiny

SETTINGS: dict[str, Any] = {"steps": 5, "widths": [4, 5, 3, 1], "points": 9, "gain": 1.0, "lr": 0.01}


@pytest.mark.parametrize("leak", [0.0, 1.0])
@pytest.mark.parametrize("loss", ["logistic", "exponential", "squared", "classes"])
def test_a_step_is_along_the_gradient(loss: str, leak: float) -> None:
    outputs = 3 if loss == "classes" else 1
    settings = {**SETTINGS, "loss": loss, "leak": leak, "widths": [4, 5, 3, outputs]}
    x, y, weights = data_and_weights(1, settings)
    layers = [torch.tensor(w, requires_grad=True) for w in weights]
    z = torch.tensor(x)
    for k, layer in enumerate(layers):
        z = z @ layer.T
        z = functional.leaky_relu(z, leak) if k < len(layers) - 1 else z
    labels = torch.tensor(y)
    risk = {
        "logistic": lambda: functional.softplus(-labels * z[:, 0]).sum(),
        "exponential": lambda: torch.exp(-labels * z[:, 0]).sum(),
        "squared": lambda: ((z[:, 0] - labels) ** 2).sum() / 2,
        "classes": lambda: functional.cross_entropy(z, labels.long(), reduction="sum"),
    }[loss]()
    slow = [g.numpy() for g in torch.autograd.grad(risk, layers)]
    moves = [w - new for w, new in zip(weights, step(weights, x, y, settings))]
    size = settings["lr"] if loss == "squared" else STRIDE * norm(weights) / norm(slow)
    for move, gradient in zip(moves, slow):
        np.testing.assert_allclose(move, size * gradient, rtol=1e-9, atol=1e-14)


def test_slopes_do_not_vanish_however_large_the_outputs() -> None:
    for loss in ("logistic", "exponential", "classes"):
        settings = {**SETTINGS, "loss": loss, "leak": 1.0, "widths": [4, 5, 3, 3 if loss == "classes" else 1]}
        x, y, weights = data_and_weights(0, settings)
        after = step([1e3 * w for w in weights], x, y, settings)
        assert all(np.isfinite(w).all() for w in after)
        assert any((a != 1e3 * b).any() for a, b in zip(after, weights))


def test_the_two_points_keep_their_ratio() -> None:
    variant = next(variant for variant in low_rank.variants(low_rank.SCALES["quick"]) if variant.name == low_rank.TWO)
    found = low_rank.compute({**variant.config, "steps": 2500}, 0, lambda share: None).values
    assert found["ratio"] == pytest.approx((1 + abs(np.cos(np.deg2rad(100)))) / 2, abs=0.02)
    assert found["settled"] == 0
    assert found["on"] < 1e-4 < 0.3 < found["off"]


@pytest.mark.slow
def test_low_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "MEASUREMENTS", 6)
    tiny = replace(low_rank.SCALES["quick"], steps=60, seeds=2, widths=(3, 4, 4), points=6)
    result = run_tiny("low-rank", tiny, tmp_path, monkeypatch)
    assert len(low_rank.variants(tiny)) == 11
    assert all(0 < n.ratio <= 1 for n in result.numbers)
