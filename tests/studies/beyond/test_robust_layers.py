"""The study of layers: its variants change one setting, its radii have the mean they say, and what it measures is read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from excite.jobs.training_job import TrainingJob
from excite.studies.beyond.robust_layers import ALL, DEEP, PGD, RHO, SCALES, SHALLOW, STUDY, radii_by_richness, variants
from excite.studies.study import VariantResult

QUICK = SCALES["quick"]


def test_variants_change_the_attack_only():
    first, *others = (variant.config for variant in variants(QUICK))
    for config in others:
        assert {**config, "adversarial": None} == {**first, "adversarial": None}
        assert config["adversarial"] != first["adversarial"]


def test_radii_by_richness_have_the_mean_and_the_order():
    radii = radii_by_richness(RHO)
    assert sum(radii.values()) / len(radii) == pytest.approx(RHO, rel=1e-3)
    assert max(radii, key=lambda layer: radii[layer]) == "1.first"  # the poorest
    assert min(radii, key=lambda layer: radii[layer]) == "2.skip"


def test_claim_compares_with_the_better_third():
    values = {ALL: 0.7, SHALLOW: 0.6, DEEP: 0.65}
    numbers = {name: VariantResult(name, 0, {"test_last": value}) for name, value in values.items()}
    assert STUDY.claims(QUICK)[0].effect(numbers) == pytest.approx(0.05)


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
