"""Study `class-targets`: scores decide as targets do, groupings are as described, the claims on planted numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from excite import Hierarchy
from excite.studies.computed import Outcome
from excite.studies.excitation.class_targets import (
    BY_MEANS,
    CLASSES,
    CODES,
    CODES_EXCITED,
    HIERARCHY_EXCITED,
    ONE_HOT,
    ORDERED,
    SCATTERED,
    STUDY,
    claims,
    grouping,
    leaves,
    make,
    scattered,
    variants,
)
from excite.studies.judging.verdicts import judge
from excite.studies.study import Scale, Variant, VariantResult
from studies.small import run_tiny

TINY = Scale(name="quick", seeds=1, words="tiny")


def points() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(200, 64, generator=torch.Generator().manual_seed(0)), torch.arange(200) % CLASSES


@pytest.mark.parametrize("variant", variants(TINY), ids=lambda variant: variant.name)
def test_the_largest_score_is_the_decision_of_the_target(variant: Variant) -> None:
    """The nearest code, or the leaf to which the nodes lead: what `PersistentExcitation.predict` says."""
    x, y = points()
    pe, classifier = make(variant.config, x, y, 0)
    with torch.no_grad():
        assert torch.equal(classifier(x).argmax(1), pe.predict(x))


def test_scattered_groups_part_neighbours() -> None:
    assert scattered(range(4)) == [[0, 2], [1, 3]]
    x, y = points()
    near, far = grouping("by means", x, y), grouping("scattered", x, y)
    assert sorted(leaves(far)) == list(range(CLASSES))
    assert leaves(near)[::2] == sorted(far.nodes[0][0], key=leaves(near).index)
    assert (near.depth, far.depth, grouping("in order", x, y).depth) == (4, 4, 4)
    assert leaves(Hierarchy([[3, 1], [0, 2]])) == [3, 1, 0, 2]


def test_a_network_that_decides_by_chance_decides_no_claim(tmp_path: Path) -> None:
    """Its margins and its gap say nothing about its variant."""
    job = STUDY.method.job("class-targets", variants(TINY)[0], TINY, 0, tmp_path / "codes-0", "cpu")
    values = {"accuracy_test": 0.1, "margin_test": 0.0, "gap": 0.0}
    for accuracy in (0.1, 0.7):
        job.write(Outcome({**values, "accuracy_test": accuracy}, {}, []))
        assert STUDY.method.read(job)[0].by_chance == (accuracy < 0.2)


def test_claims_on_planted_numbers() -> None:
    margin = {CODES: 0.2, ONE_HOT: 0.2, BY_MEANS: 0.15, SCATTERED: 0.1, CODES_EXCITED: 0.3, HIERARCHY_EXCITED: 0.1}
    numbers = []
    for seed in range(6):
        for name in (CODES, ONE_HOT, ORDERED, BY_MEANS, SCATTERED, CODES_EXCITED, HIERARCHY_EXCITED):
            size = margin.get(name, 0.1)
            behind = {CODES: 0.1, ORDERED: 0.2}.get(name, 0.05)
            values = {"margin_test": size, "accuracy_test": 0.8 + size / 2, "gap": 0.4 - size, "behind": behind}
            values = {key: value * (1 + 1e-4 * seed * len(name)) for key, value in values.items()}
            numbers.append(VariantResult(name, seed, values))
    words = [judge(claim, numbers).word for claim in claims(TINY)]
    assert words == ["holds", "holds", "holds", "fails", "holds", "holds", "holds", "holds", "fails", "holds", "fails"]


@pytest.mark.slow
def test_the_whole_path_of_class_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from excite import studies

    study = studies.STUDIES["class-targets"]
    short = [Variant(v.name, {**v.config, "epochs": 3}) for v in variants(TINY)]
    monkeypatch.setitem(studies.STUDIES, study.name, replace(study, variants=lambda scale: short))
    assert len(run_tiny(study.name, TINY, tmp_path, monkeypatch).verdicts) == len(claims(TINY))
