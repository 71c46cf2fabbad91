"""Study `depth`: updates and slopes against autograd, steps against SGD, the claims on planted numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from excite.studies.computed import StepsScale
from excite.studies.judging.verdicts import judge
from excite.studies.study import VariantResult
from excite.studies.trajectory.depth import BY_DEPTH, BY_OMEGA, claims, network, sizes, train
from studies.small import nothing, run_tiny

TINY = StepsScale(name="quick", seeds=1, steps=20, words="tiny")


def test_sizes_are_norms_of_derivatives_by_bias_and_by_input() -> None:
    model = network(4, 3, 0)
    x = torch.randn(5, 4, dtype=torch.float64)
    updates, slopes = sizes(model, x)
    for at, point in enumerate(x):
        point = point.clone().requires_grad_()
        by_bias, by_input = torch.autograd.grad(model(point).sum(), [model[0].bias, point])
        assert float(updates[at]) == pytest.approx(float(by_bias.norm()), rel=1e-12)
        assert float(slopes[at]) == pytest.approx(float(by_input.norm()), rel=1e-12)


def test_training_is_sgd_and_the_bias_moves_by_what_is_recorded() -> None:
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    model = network(4, 3, 1)
    slow = copy.deepcopy(model)
    moved, bound = train(model, x, y, 0.05, 14, 2, nothing)
    optimizer = torch.optim.SGD(slow.parameters(), 0.05)
    order, way = torch.Generator().manual_seed(2), []
    for at in [int(at) for _ in range(3) for at in torch.randperm(6, generator=order)][:14]:
        before = slow[0].bias.detach().clone()
        optimizer.zero_grad()
        ((slow(x[at]) - y[at]).square().sum() / 2).backward()
        optimizer.step()
        way.append(float((slow[0].bias.detach() - before).norm()))
    for p, q in zip(model.parameters(), slow.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)
    torch.testing.assert_close(moved, torch.tensor(way), rtol=1e-5, atol=1e-9)
    assert bool((bound > 0).any())


def test_claims_on_planted_numbers() -> None:
    numbers = []
    for seed in range(5):
        for at, name in enumerate(dict.fromkeys((*BY_DEPTH, *BY_OMEGA))):
            omega = BY_OMEGA.index(name) if name in BY_OMEGA else 0
            values = {
                "corollary1": 1 + 0.01 * seed * (1 + at),
                "product": 10.0 ** (at * (1 + 0.01 * seed)),
                "slope": 0.5,
                "early": 0.2 + 0.01 * seed,
                "early_moved": 0.8 + 0.01 * seed,
                "speed": 1.0 + omega,
                "portion": 0.9 - (0.3 + 0.01 * seed) * omega,
            }
            numbers.append(VariantResult(name, seed, values))
    words = [judge(claim, numbers).word for claim in claims(TINY)]
    assert words == ["holds", "holds", "holds", *["fails"] * 3, *["holds"] * 3, "holds"]


@pytest.mark.slow
def test_the_whole_path_of_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run_tiny("depth", TINY, tmp_path, monkeypatch).verdicts) == len(claims(TINY))
