"""The study of robust overfitting: its claims on planted numbers, and one tiny training read back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from excite.jobs.training_job import TrainingJob
from excite.runs import Run
from excite.studies.beyond.robust_overfitting import AUTO, PGD, SCALES, STUDY, awp, both, every, style, variants
from excite.studies.study import VariantResult

QUICK = SCALES["quick"]


def planted(**robust: tuple[float, float]) -> dict[str, VariantResult]:
    """Results of one seed: (clean, robust) accuracy on test data by variant; training is robust on .9, or .7 when excited."""
    found = {}
    for variant in variants(QUICK):
        clean, test = robust.get(variant.name, (0.95, 0.6))
        train = 0.7 if variant.name.startswith("every") else 0.9
        values = {"clean_last": clean, "test_last": test, "test_best": test + 0.02, "gap_last": train - test}
        found[variant.name] = VariantResult(variant.name, 0, values)
    return found


def effects(numbers: dict[str, VariantResult]) -> list[float]:
    return [claim.effect(numbers) for claim in STUDY.claims(QUICK)]


def test_claims_measure_what_they_say():
    rho, gamma = QUICK.both
    numbers = planted(**{every(rho): (0.95, 0.65), awp(gamma): (0.95, 0.62), both(QUICK): (0.95, 0.66)})
    halved, last, _, together = effects(numbers)
    assert halved == pytest.approx(math.log2(0.3 / 0.05))
    assert last == pytest.approx(0.65 - 0.62)
    assert together == pytest.approx(0.01)


def test_frontier_compares_at_equal_clean_accuracy():
    names = [PGD, *map(every, QUICK.rho)]
    line = dict(zip(names, [(0.9, 0.5), (0.8, 0.6), (0.7, 0.7), (0.6, 0.8)]))  # robust = 1.4 − clean
    weights = dict(zip(map(awp, QUICK.gamma), [(0.85, 0.5), (0.75, 0.6), (0.95, 0.9)]))  # the last is out of range
    assert effects(planted(**line, **weights))[2] == pytest.approx(((0.55 - 0.5) + (0.65 - 0.6)) / 2)
    outside = dict.fromkeys(map(awp, QUICK.gamma), (0.99, 0.9))
    assert math.isnan(effects(planted(**line, **outside))[2])


def test_no_gap_is_no_effect():
    numbers = planted()
    flat = {**numbers, PGD: replace(numbers[PGD], values={**numbers[PGD].values, "gap_last": 0.0})}
    assert math.isnan(effects(flat)[0])


def test_every_variant_is_a_config(tmp_path: Path):
    for scale in SCALES.values():
        configs = [STUDY.method.job("s", v, scale, 1, tmp_path, "cpu").config for v in variants(scale)]
        assert len({config.model_dump_json() for config in configs}) == len(configs)
        assert all(config.robust is not None and config.adversarial is not None for config in configs)


def test_every_variant_has_a_style_of_its_own():
    for scale in SCALES.values():
        names = {variant.name for variant in variants(scale)}
        assert names == style(scale).keys()
        assert len(set(style(scale).values())) == len(names)


def test_claims_need_no_extra_variants():
    for scale in SCALES.values():
        trained = {variant.name for variant in variants(scale) if not variant.extra}
        assert all(set(claim.variants) <= trained for claim in STUDY.claims(scale))


@pytest.mark.slow
def test_one_training_becomes_numbers_and_a_figure(tmp_path: Path):
    scale = replace(QUICK, epochs=5, points=20, model={"name": "small-cnn"})
    auto = next(v for v in variants(scale) if v.name == AUTO)
    job = STUDY.method.job("s", auto, scale, 0, tmp_path / "run", "cpu")
    assert isinstance(job, TrainingJob)
    job.run(lambda *_: None)
    result, lines = STUDY.method.read(job)
    assert 0 <= result.test_last <= result.test_best <= 1
    assert result.gap_last == pytest.approx(result.train_last - result.test_last)
    assert len(lines["test"]) == 2
    assert "autoattack_last" not in result.values
    with Run.open(tmp_path / "run", "a") as run:  # as benchmarks.autoattack --runs does
        run.write_json("autoattack", {"images": 20, "step": 1, "clean": 0.5, "robust": 0.25})
    assert STUDY.method.read(job)[0].autoattack_last == 0.25
    figure = STUDY.method.figures(STUDY, scale, {AUTO: [lines]}, [result])["figure"][1]
    figure.savefig(tmp_path / "figure.png")
