"""Study `all-layer-gap`: margins of a linear model against closed forms, the claims on planted numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from excite.studies.judging.verdicts import judge
from excite.studies.richness.all_layer_gap import EVERY, INPUT, PLAIN, SETS, claims, measure, variants
from excite.studies.study import Scale, Variant, VariantResult
from studies.small import run_tiny

TINY = Scale(name="quick", seeds=1, words="tiny")


def test_margins_of_a_product_are_known() -> None:
    """f(x) = b·a·x at x > 0 with perturbations d1, d2 of at most ε moves by ε|ba| + ε|b|; relative to x and ax by 2ε|bax|."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[2].weight.fill_(4.0)
    x = torch.tensor([[0.25], [0.5]], dtype=torch.float64)
    f = 8 * x[:, 0]  # 2 and 4, both above the threshold of 0.5
    found = {perturbed: measure(model, x, torch.ones(2, dtype=torch.long), perturbed).values for perturbed in SETS}
    torch.testing.assert_close(found["input"].double(), (f - 0.5) / 8, rtol=1e-4, atol=0)
    torch.testing.assert_close(found["all"].double(), (f - 0.5) / (8 + 4), rtol=1e-4, atol=0)
    torch.testing.assert_close(found["relative"].double(), (f - 0.5) / (2 * f), rtol=1e-4, atol=0)


def test_claims_on_planted_numbers() -> None:
    size = {PLAIN: 0.1, INPUT: 0.2, EVERY: 0.4}
    numbers = []
    for seed in range(6):
        for name, value in size.items():
            values = {f"{kind}_test": value for kind in SETS} | {f"{kind}_gap": 0.5 - value for kind in SETS}
            values["all_gap"] += 0.05
            values = {key: number * (1 + 1e-3 * seed * len(name)) for key, number in values.items()}
            numbers.append(VariantResult(name, seed, values))
    assert [judge(claim, numbers).word for claim in claims(TINY)] == ["holds"] * 10


@pytest.mark.slow
def test_the_whole_path_of_all_layer_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from excite import studies
    from excite.studies.richness import all_layer_gap

    study = studies.STUDIES["all-layer-gap"]
    monkeypatch.setattr(all_layer_gap, "POINTS", 10)
    short = [Variant(v.name, {**v.config, "epochs": 10}) for v in variants(TINY)]
    monkeypatch.setitem(studies.STUDIES, study.name, replace(study, variants=lambda scale: short))
    assert len(run_tiny(study.name, TINY, tmp_path, monkeypatch).verdicts) == len(claims(TINY))
