"""Study `random-perturbations`: the random loss, ranks against a plain SVD, the claims on planted numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from excite.studies.judging.verdicts import judge
from excite.studies.richness.random_perturbations import (
    FULL,
    PLAIN,
    RANDOM,
    TENTHS,
    WORST,
    claims,
    effective_rank,
    network,
    points,
    random_loss,
)
from excite.studies.study import Scale, Variant, VariantResult
from studies.small import run_tiny

TINY = Scale(name="quick", seeds=1, words="tiny")


def test_the_random_loss_of_a_linear_model_is_known() -> None:
    """f(x; ±d) = f(x) ± w·d, so that the loss is (f − y)² + (w·d)², with |d_i| = r."""
    model = nn.Sequential(nn.Linear(1, 1)).double()
    x, y = torch.randn(7, 1, dtype=torch.float64), torch.randint(2, (7,)).double()
    loss = random_loss(model, x, y, 0.3, torch.Generator().manual_seed(0))
    expected = (model(x)[:, 0] - y).square().mean() + (0.3 * model[0].weight).square().sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    at_zero = random_loss(
        network(0).double(), torch.ones(2, 64).double(), torch.ones(2).double(), 0.0, torch.Generator()
    )
    torch.testing.assert_close(at_zero, (network(0).double()(torch.ones(2, 64).double())[:, 0] - 1).square().mean())


def test_the_effective_rank_is_that_of_the_last_hidden_layer() -> None:
    model, x = network(1), torch.rand(30, 64)
    signal = model[:-1](x).detach().double()
    values = torch.linalg.svdvals(signal - signal.mean(0)) ** 2
    shares = values[values > 0] / values.sum()
    expected = float((-(shares * shares.log()).sum()).exp())
    assert effective_rank(model, x) == pytest.approx(expected, rel=1e-4)


def test_random_points_have_full_rank_and_both_labels() -> None:
    x, y, new, labels = points("random", 0)
    assert int(torch.linalg.matrix_rank(x)) == 64
    assert float(x.abs().max()) <= 1
    assert 0.2 < float(y.double().mean()) < 0.8
    assert len(new) == len(labels)


def test_claims_on_planted_numbers() -> None:
    numbers = []
    for seed in range(5):
        for name, margin, gap in ((PLAIN, 0.1, 0.3), (RANDOM, 0.2, 0.2), (WORST, 0.4, 0.1), (FULL, 0.0, 0.5)):
            noise = 0.001 * seed * (1 + len(name))
            ranks = {f"rank{tenth}": 12.0 - tenth * (1 + noise) for tenth in range(TENTHS + 1)}
            ranks["rank5"] = 11.0 + noise  # it rises for a while
            end = {"rank_start": 12.0, "rank_end": (3.0 if name == WORST else 2.0) + noise}
            more = {"margin_test": margin + noise, "gap": gap - noise, "raw": 0.5 + noise}
            numbers.append(VariantResult(name, seed, {**ranks, **end, **more}))
    words = [judge(claim, numbers).word for claim in claims(TINY)]
    assert words == ["holds", "holds", "holds", "holds", "fails", "holds", "holds", "fails"]


@pytest.mark.slow
def test_the_whole_path_of_random_perturbations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from excite import studies

    study = studies.STUDIES["random-perturbations"]
    short = [Variant(v.name, {**v.config, "epochs": 10}) for v in study.variants(TINY)]
    monkeypatch.setitem(studies.STUDIES, study.name, replace(study, variants=lambda scale: short))
    assert len(run_tiny(study.name, TINY, tmp_path, monkeypatch).verdicts) == len(claims(TINY))
