"""Study `consequences`: its formulas on random walks and exact cases, and the whole path at a size for tests."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from excite.studies.beyond.consequences import (
    EPSILON,
    SCALES,
    _kernel,
    imbalance,
    normalized_network,
    predicted_rotation,
    rank_bound,
    stacked_gradients,
)  # fmt: skip
from studies.small import run_tiny


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_random_walk_with_decay_turns_as_predicted(optimizer: str) -> None:
    rate, decay = (1e-2, 1.0) if optimizer == "adamw" else (0.1, 0.1)
    drawn = torch.Generator().manual_seed(0)
    w = torch.randn(40, 100, generator=drawn, dtype=torch.float64)
    state, squares = torch.zeros_like(w), []
    for step in range(800):
        g = torch.randn(w.shape, generator=drawn, dtype=torch.float64)
        if optimizer == "adamw":  # noise of unit variance: √v is 1
            state = 0.9 * state + 0.1 * g
            after = w * (1 - rate * decay) - rate * state
        else:  # the gradient of a function that does not depend on the length of w falls with it
            state = 0.9 * state + g / w.norm(dim=1, keepdim=True) + decay * w
            after = w - rate * state
        if step > 500:
            squares.append(F.cosine_similarity(w, after, dim=1).arccos().square())
        w = after
    measured = float(torch.stack(squares).mean().sqrt())
    # The formula is of first order in rate·decay, here 0.01; momentum multiplies that by at most 10 in the transient terms.
    assert measured == pytest.approx(predicted_rotation(optimizer, rate, decay), rel=0.05)


def test_a_sum_of_decayed_matrices_has_the_rank_of_the_bound() -> None:
    drawn = torch.Generator().manual_seed(0)
    w = torch.zeros(60, 60, dtype=torch.float64)
    for _ in range(400):
        w = 0.8 * w + torch.outer(*torch.randn(2, 60, generator=drawn, dtype=torch.float64))
    sizes = torch.linalg.svdvals(w)
    assert int((sizes > EPSILON * sizes[0]).sum()) <= rank_bound(1, 1.0, 0.2) == pytest.approx(math.log(20) / 0.2)


def test_the_kernel_is_that_of_gradients() -> None:
    torch.manual_seed(0)
    a, w, x = torch.randn(1).double(), torch.randn(1, 4).double(), torch.randn(6, 4).double()
    gradients = [torch.cat([w[0] @ one[None].T, a * one]) for one in x]  # df/da and df/dw of a·w'x
    expected = torch.stack(gradients) @ torch.stack(gradients).T
    assert torch.allclose(_kernel(a, w, x)[0], expected)


def test_the_imbalance_is_conserved_up_to_the_size_of_a_step() -> None:
    found = imbalance(500, 0)
    assert found.values["drift"] < 0.01  # of first order in the rate, 0.01
    assert len(found.detail) == 7


def test_stacked_networks_have_their_own_gradients() -> None:
    torch.manual_seed(0)
    shapes = [(5, 16), (5, 5), (8, 5)]
    weights = [torch.randn(3, *shape) for shape in shapes]
    teacher, use = torch.randn(16, 8), torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    found = stacked_gradients(weights, teacher, use, torch.Generator().manual_seed(1))
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(3, 2, 16, generator=drawn)
    y = (x @ teacher + torch.randn(3, 2, 8, generator=drawn)).argmax(2)
    for net in range(3):
        own = [w[net : net + 1].clone().requires_grad_() for w in weights]
        logits = normalized_network(own, x[net : net + 1])[0]
        loss = (F.cross_entropy(logits, y[net], reduction="none") * use[net]).sum()
        for mine, theirs in zip(torch.autograd.grad(loss, own), found):
            assert torch.allclose(mine[0], theirs[net], atol=1e-6)


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_tiny(
        "consequences", dataclasses.replace(SCALES["quick"], seeds=2, steps=100, words="tiny"), tmp_path, monkeypatch
    )
