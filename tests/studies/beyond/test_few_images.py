"""The study without attacks: its tasks, its claims on planted numbers, and one tiny training read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from excite.studies.beyond.few_images import SCALES, STUDY, Task, claims, methods, name_of, variants
from excite.studies.study import VariantResult

QUICK = SCALES["quick"]


def test_tasks_and_methods_have_names_of_their_own():
    for scale in SCALES.values():
        names = [variant.name for variant in variants(scale)]
        assert len(set(names)) == len(names) == len(scale.tasks) * len(methods(scale))
    assert Task(400, noise=0.2).name == "400 images, 20% random labels"
    assert Task(4_000, transformer=True).name == "4,000 images, ViT"


def test_nothing_attacks_the_input():
    assert {variant.config["adversarial"]["radius"] for variant in variants(QUICK)} == {0.0}


def test_claims_are_gains_over_plain():
    first, second = list(methods(QUICK))[1:3]
    gains = {first: 0.02, second: 0.03}
    values = {name_of(t, m): 0.9 + gains.get(m, 0.0) for t in QUICK.tasks for m in methods(QUICK)}
    numbers = {name: VariantResult(name, 0, {"accuracy_test": value}) for name, value in values.items()}
    expected = [gain for gain in gains.values() for _ in QUICK.tasks]
    assert [claim.effect(numbers) for claim in claims(QUICK)] == pytest.approx(expected)


@pytest.mark.slow
def test_one_training_with_random_labels_is_read_and_drawn(tmp_path: Path):
    scale = replace(QUICK, tasks=(Task(40, noise=0.5, epochs=2),), data={"name": "digits", "test": 40})
    results = []
    for variant in variants(scale)[:2]:
        job = STUDY.method.job("s", variant, scale, 0, tmp_path / variant.slug, "cpu")
        job.run(lambda *_: None)
        results.append(STUDY.method.read(job)[0])
    assert all(0 <= result.accuracy_test <= 1 for result in results)
    figure = STUDY.method.figures(STUDY, scale, {}, results)["figure"][1]
    figure.savefig(tmp_path / "figure.png")
