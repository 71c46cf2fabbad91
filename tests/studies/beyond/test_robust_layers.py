"""The study of layers: its variants change one setting, its radii have the mean they say, and what it measures is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from excite import AdversarialTraining
from excite.jobs.training_job import TrainingJob
from excite.runs import load_run
from excite.studies.beyond.robust_layers import (
    ALL,
    BEFORE,
    DEEP,
    FREE,
    PGD,
    POOR,
    RHO,
    SCALES,
    SHALLOW,
    STUDY,
    hidden_richness,
    radii_by_richness,
    variants,
)
from excite.studies.study import VariantResult
from excite.train import build, make_model
from excite.train.evaluate import load_model

QUICK = SCALES["quick"]


RICHNESS = {"1.first": 0.2, "1.second": 0.3, "2.skip": 0.8, "2.first": 0.3, "2.second": 0.3, "7": 0.25}


def test_variants_change_the_attack_only():
    first, *others = (variant.config for variant in variants(QUICK) if variant.name not in (BEFORE, FREE))
    for config in others:
        assert {**config, "adversarial": None} == {**first, "adversarial": None}
        assert config["adversarial"] != first["adversarial"]


def test_free_variant_has_half_of_the_epochs():
    config = {variant.name: variant.config for variant in variants(QUICK)}
    assert 2 * config[FREE]["epochs"] == config[ALL]["epochs"]
    assert config[FREE]["adversarial"]["free"]


def test_radii_by_richness_have_the_mean_and_the_order():
    radii = radii_by_richness(RICHNESS, RHO)
    assert sum(radii.values()) / len(radii) == pytest.approx(RHO, rel=1e-3)
    assert radii["1.first"] == pytest.approx(4 * radii["2.skip"], rel=1e-3)
    assert max(radii, key=lambda layer: radii[layer]) == "1.first"  # the poorest


def test_gates_change_nothing_and_are_perturbed():
    (gated,) = (variant.config for variant in variants(QUICK) if variant.name == BEFORE)
    options = gated["model"]["options"]
    plain, same = build("preact-resnet", seed=3, **options), make_model(gated["model"]["name"], seed=3, **options)
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(plain(x), same(x))
    attack = gated["adversarial"]
    at = AdversarialTraining(same, 0.1, classes=10, hidden_radius=attack["hidden_radius"], layers=attack["layers"])
    assert set(at.all_perturbations(x, torch.arange(4))) == {"", *attack["layers"]}
    assert len(attack["layers"]) == sum(isinstance(module, torch.nn.BatchNorm2d) for module in plain.modules())


def test_conserved_scale_is_the_same_in_every_layer():
    model = build("preact-resnet", channels=3, outputs=10)
    scales = [float(w.detach().square().sum() / len(w)) for w in model.parameters() if w.dim() > 1]
    assert scales == pytest.approx([1 / 3] * len(scales), rel=0.06)


@pytest.mark.slow
def test_radii_come_from_a_training_with_the_same_seed(tmp_path: Path):
    scale = replace(QUICK, epochs=1, points=20, data={"name": "digits", "train": 40, "test": 40})
    (poor,) = (variant for variant in variants(scale) if variant.name == POOR)
    job = STUDY.method.job("s", poor, scale, 0, tmp_path / "poor-0", "cpu")
    job.run(lambda *_: None)
    assert job.finished()
    with load_run(job.folder) as run:
        radii = run.config["adversarial"]["hidden_radius"]
    first = load_model(tmp_path / "poor-0.richness", trust=True)
    assert radii == radii_by_richness(hidden_richness(first.model, first.points("test", 500)[0]), RHO)
    equal = STUDY.method.job("s", replace(poor, name=ALL), scale, 0, tmp_path / "all-0", "cpu")
    assert not replace(equal, folder=job.folder).finished()
    equal.run(lambda *_: None)
    assert not replace(job, folder=equal.folder).finished()


def test_claim_compares_with_the_better_third():
    values = {ALL: 0.7, SHALLOW: 0.6, DEEP: 0.65}
    numbers = {name: VariantResult(name, 0, {"test_last": value}) for name, value in values.items()}
    assert STUDY.claims(QUICK)[0].effect(numbers) == pytest.approx(0.05)


def test_claims_are_judged_by_seeds_that_did_not_suggest_them():
    for scale, expected in (("quick", [True, True]), ("full", [False, True])):
        for claim in STUDY.claims(SCALES[scale]):
            results = [{name: VariantResult(name, seed) for name in claim.variants} for seed in (4, 5)]
            assert [claim.premise is None or claim.premise(result) for result in results] == expected


@pytest.mark.slow
def test_one_training_is_measured_and_drawn(tmp_path: Path):
    scale = replace(QUICK, epochs=5, points=20, data={"name": "digits", "train": 40, "test": 40})
    job = STUDY.method.job("s", variants(scale)[1], scale, 0, tmp_path / "run", "cpu")
    assert isinstance(job, TrainingJob)
    assert not job.finished()
    job.run(lambda progress: None)
    assert job.finished()
    result, lines = STUDY.method.read(job)
    assert 0 < result.rank < 1
    assert 0 < result.alignment <= 1
    assert result.layer_margin >= 0
    figure = STUDY.method.figures(STUDY, scale, {ALL: [lines]}, [result])["figure"][1]
    figure.savefig(tmp_path / "figure.png")
    assert PGD not in result.variant
