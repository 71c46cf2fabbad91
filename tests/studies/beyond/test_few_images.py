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
        assert len(set(names)) == len(names) == sum(len(methods(scale, task)) for task in scale.tasks)
    assert Task(400, noise=0.2).name == "400 images, 20% random labels"
    assert Task(4_000, transformer=True).name == "4,000 images, ViT"
    assert Task(500, noise=0.4, other="mnist").name == "500 images of MNIST, 40% random labels"


def test_larger_images_have_their_own_data_and_network():
    config = {variant.name: variant.config for variant in variants(SCALES["full"])}
    other = config["500 images of Fashion-MNIST, 40% random labels: plain"]
    assert other["data"] == {"name": "fashion-mnist", "test": 2_000, "train": 500, "label_noise": 0.4}
    assert other["model"]["options"] == {"width": 8, "stages": 3, "blocks": 1}
    assert config["400 images: plain"]["data"]["name"] == "digits"


def test_nothing_attacks_the_input():
    assert {variant.config["adversarial"]["radius"] for variant in variants(QUICK)} == {0.0}


def planted(scale, seed):
    """Accuracies that grow with the task's number and the method's."""
    tasks = {task: 0.5 + 0.01 * number for number, task in enumerate(scale.tasks)}
    values = {
        name_of(task, method): base + 0.001 * (number + 1) * (list(methods(scale)).index(method))
        for number, (task, base) in enumerate(tasks.items())
        for method in methods(scale, task)
    }
    return {name: VariantResult(name, seed, {"accuracy_test": value}) for name, value in values.items()}


def test_claims_are_mean_gains_over_tasks_of_one_kind():
    full = SCALES["full"]
    effects = [claim.effect(planted(full, 5)) for claim in claims(full)]
    few, noisy, other, other_noisy = ((1 + 2 + 3 + 4) / 4, (5 + 6) / 2, (8 + 9 + 10) / 3, (11 + 12) / 2)
    milli = [few, 2 * few, 2 * few, 2 * noisy, 7, other, other_noisy, 2 * other, 2 * other_noisy]
    assert effects == pytest.approx([0.001 * value for value in milli])
    assert len(claims(QUICK)) == 4  # no transformer, no other data


def test_digits_are_judged_by_new_seeds_and_other_data_by_all():
    full = SCALES["full"]
    for seed, expected in ((4, [False] * 5), (5, [True] * 5)):
        premises = [claim.premise for claim in claims(full)]
        assert [premise(planted(full, seed)) for premise in premises if premise] == expected
    assert all(claim.premise is None for claim in claims(QUICK))


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
