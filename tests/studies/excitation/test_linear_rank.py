"""Gradients and training of `linear-rank` against autograd, and what the theorems say of tiny networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from excite.bounds.excitation.hard_margin import separation
from excite.studies.excitation.linear_rank import (
    DECAY,
    GROWING,
    LOSSES,
    SCALES,
    SLOPES,
    STRONG,
    compute,
    data_and_weights,
    descend,
    gradients,
    grow,
    outputs,
    variants,
)  # fmt: skip
from studies.small import run_tiny

SETTINGS: dict[str, Any] = {
    "steps": 300, "widths": [4, 5, 3], "points": 9, "lr": 2e-3, "gain": 1.0, "loss": "cross-entropy", "decay": 0.0,
}  # fmt: skip


def nothing(share: float) -> None:
    pass


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_is_that_of_autograd(loss: str) -> None:
    x, y, weights = data_and_weights(0, SETTINGS)
    layers = [torch.tensor(w, requires_grad=True) for w in weights]
    z = torch.tensor(x)
    for layer in layers:
        z = z @ layer.T
    objective = LOSSES[loss](z[:, 0], torch.tensor(y)) + 0.3 * sum((layer**2).sum() for layer in layers)
    slow = torch.autograd.grad(objective, layers)
    after = descend(weights, x, 2 * y - 1, {**SETTINGS, "loss": loss, "decay": 0.3})
    for w, new, gradient in zip(weights, after, slow):
        np.testing.assert_allclose(new, w - 2e-3 * gradient.numpy(), rtol=1e-10, atol=1e-13)


def test_a_growing_step_goes_along_a_tiny_gradient() -> None:
    x, y, weights = data_and_weights(0, SETTINGS)
    s = 2 * y - 1
    found = gradients(weights, x, SLOPES["cross-entropy"](outputs(weights, x), s))
    moves = [w - new for w, new in zip(weights, grow(weights, x, s))]
    size = np.sqrt(sum((g**2).sum() for g in found) / sum((w**2).sum() for w in weights))
    for move, gradient in zip(moves, found):
        np.testing.assert_allclose(move, 1e-3 * gradient / size, rtol=1e-9, atol=1e-15)
    large = [100 * w for w in weights]  # every slope that is not the largest underflows
    assert all(np.isfinite(w).all() for w in grow(large, x, s))


def test_data_are_separable_through_the_origin() -> None:
    for seed in range(5):
        x, y, _ = data_and_weights(seed, SETTINGS)
        assert separation(x, 2 * y - 1, bias=False) > 0.01


def test_theorem_4_gives_rank_one_and_strong_decay_rank_zero() -> None:
    one = compute({**SETTINGS, "decay": 1.0, "steps": 3000}, 0, nothing).values
    assert (one["rank"], one["passed"]) == (1, 0)
    assert one["ratio"] < 1e-3
    none = compute({**SETTINGS, "decay": 10.0, "steps": 3000}, 0, nothing).values
    assert none["rank"] == 0


def test_bounds_are_counted_where_they_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    import excite.studies.excitation.linear_rank as module

    monkeypatch.setattr(module, "bound_of", lambda weights, *rest: np.zeros(len(weights)))
    assert compute(SETTINGS, 0, nothing).values["passed"] > 40


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(SCALES["quick"], steps=400, seeds=2, widths=(3, 3), points=6)
    result = run_tiny("linear-rank", tiny, tmp_path, monkeypatch)
    assert {n.variant for n in result.numbers} >= {*DECAY.values(), STRONG, GROWING}
    assert all(n.passed == 0 for n in result.numbers)
    assert len(variants(tiny)) == 8
