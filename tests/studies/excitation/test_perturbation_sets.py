"""Study `perturbation-sets`: sizes and effects against known ones, matched accuracy, the claims on planted numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from excite.studies.excitation.perturbation_sets import (
    ADDITIVE,
    COST,
    EQUAL,
    MULTIPLICATIVE,
    OWN,
    PLAIN,
    RADIUS,
    SQUARED,
    best_margin,
    claims,
    effect_of,
    signal_size,
    variants,
)
from excite.studies.judging.verdicts import judge
from excite.studies.study import Scale, Variant, VariantResult
from studies.small import run_tiny

TINY = Scale(name="quick", seeds=1, words="tiny")


def test_effects_of_a_linear_model_are_known() -> None:
    """f(x) = w·x moves by r‖w‖₁ under additive perturbations, and by r Σ|w_i x_i| under multiplicative ones."""
    model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight, size = model[0].weight.detach()[0], model(x).detach().abs().mean()
    additive, multiplicative = RADIUS * weight.abs().sum() / size, RADIUS * (x * weight).abs().sum(1).mean() / size
    assert effect_of(model, x, "additive") == pytest.approx(float(additive), rel=1e-9)
    assert effect_of(model, x, "multiplicative") == pytest.approx(float(multiplicative), rel=1e-9)
    larger = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    larger.load_state_dict({"0.weight": 1000 * model[0].weight.detach()})
    assert effect_of(larger, x, "additive") == pytest.approx(float(additive), rel=1e-9)


def test_the_size_of_signals_is_a_geometric_mean() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for layer, weight in zip((model[0], model[2]), (2.0, 8.0)):
            layer.weight.fill_(weight)
            layer.bias.zero_()
    assert signal_size(model, torch.ones(4, 1, dtype=torch.float64)) == pytest.approx(math.sqrt(2 * 16))


def test_matched_accuracy_leaves_out_what_costs_too_much() -> None:
    def found(name: str, margin: float, accuracy: float) -> VariantResult:
        return VariantResult(name, 0, {"margin_test": margin, "accuracy_test": accuracy})

    n = {SQUARED: found(SQUARED, 0.1, 1.0), "a": found("a", 0.3, 1 - COST / 2), "b": found("b", 0.9, 1 - 2 * COST)}
    assert best_margin(n, ("a", "b")) == 0.3
    assert math.isnan(best_margin(n, ("b",)))


def test_claims_on_planted_numbers() -> None:
    numbers = []
    for seed in range(6):
        noise = 0.001 * seed
        for name in (SQUARED, PLAIN, ADDITIVE, MULTIPLICATIVE, *EQUAL.values(), *OWN.values()):
            margin = {SQUARED: 0.4, MULTIPLICATIVE: 0.3, ADDITIVE: 0.2}.get(name, 0.6 if name in OWN.values() else 0.1)
            size = 4.0 if name == ADDITIVE else 1.0
            changes = {"size_change": 1.0, "additive_change": -2.0, "multiplicative_change": 0.1}
            values = {"margin_test": margin, "gap": 0.1 + margin, "size": size, **changes}
            values = {key: value * (1 + noise * len(name)) for key, value in values.items()}
            numbers.append(VariantResult(name, seed, {**values, "accuracy_test": 1.0}))
    assert [judge(claim, numbers).word for claim in claims(TINY)] == ["holds"] * 8 + ["fails"]


@pytest.mark.slow
def test_the_whole_path_of_perturbation_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from excite import studies

    study = studies.STUDIES["perturbation-sets"]
    short = [Variant(v.name, {**v.config, "epochs": 10}) for v in variants(TINY)]
    monkeypatch.setitem(studies.STUDIES, study.name, replace(study, variants=lambda scale: short))
    assert len(run_tiny(study.name, TINY, tmp_path, monkeypatch).verdicts) == len(claims(TINY))
