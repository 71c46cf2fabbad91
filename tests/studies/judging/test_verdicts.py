"""Whether a claim holds, from the numbers of several seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from excite.errors import InputError
from excite.studies.judging.intervals import holm, over_seeds
from excite.studies.judging.verdicts import judge, judge_all
from excite.studies.study import Claim, Ladder, VariantResult
from studies.small import numbers


def claim(**limit: Any) -> Claim:
    return Claim("b is larger", "nowhere", "b minus a", ("a", "b"), lambda n: n["b"].margin_test - n["a"].margin_test, **limit)  # fmt: skip


@pytest.mark.parametrize(
    ("effects", "limit", "word"),
    [
        ([0.1, 0.2, 0.3], {"above": -0.1}, "holds"),
        ([0.1, 0.2, 0.3], {"above": 0.5}, "fails"),
        ([0.1, 0.2, 0.3], {"above": 0.0}, "undecided"),  # 0.2 ± 0.248
        ([0.1, 0.2, 0.3], {"below": 0.5}, "holds"),
        ([0.1, 0.2, 0.3], {"below": -0.1}, "fails"),
        ([0.2], {"above": 0.0}, "undecided"),
        ([0.2, math.inf], {"above": 0.0}, "undecided"),
    ],
)
def test_verdicts(effects: list[float], limit: dict[str, float], word: str) -> None:
    found = [n for i, e in enumerate(effects) for n in (numbers("a", i, 1.0), numbers("b", i, 1.0 + e))]
    verdict = judge(claim(**limit), found)
    assert verdict is not None
    assert verdict.word == word
    json.dumps(verdict.plain(), allow_nan=False)


def test_chance_settles_nothing_and_flags_are_noted() -> None:
    found = [n for i in range(5) for n in (numbers("a", i, 1.0), numbers("b", i, 2.0 + i / 100))]
    settled = judge(claim(above=0.0), found)
    assert settled is not None
    assert (settled.word, settled.notes) == ("holds", ())
    chance = judge(claim(above=0.0), [*found[:-1], replace(found[-1], by_chance=True)])
    assert chance is not None
    assert chance.word == "undecided"
    assert "accuracy close to chance" in str(chance)
    flagged = judge(claim(above=0.0), [*found[:-1], replace(found[-1], flags=("masked",))])
    assert flagged is not None
    assert flagged.word == "holds"
    assert "1 of 5 networks are unreliable" in str(flagged)
    assert judge(claim(above=0.0), [numbers("a", 0, 1.0)]) is None


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = [low <= 1 <= high for low, high in (over_seeds(rng.normal(1, 2, 5)).interval() for _ in range(2000))]
    assert 0.93 < np.mean(inside) < 0.97


def results(effects: list[float], flagged: int = 0) -> list[VariantResult]:
    """Variant "b" with these effects against "a"; the first `flagged` of its networks are not to be trusted."""
    return [
        found
        for seed, effect in enumerate(effects)
        for found in (numbers("a", seed, 1.0), numbers("b", seed, 1.0 + effect, flags=("masked",) * (seed < flagged)))
    ]


@pytest.mark.parametrize(("flagged", "word"), [(1, "holds"), (2, "undecided"), (4, "undecided")])
def test_untrusted_networks_cap_a_verdict(flagged: int, word: str) -> None:
    verdict = judge(claim(above=0.0), results([1.0, 1.1, 1.2, 1.3], flagged))
    assert verdict is not None
    assert verdict.word == word
    reason = f"the numbers of half or more of the networks of b are unreliable ({flagged} of 4)"
    assert (reason in str(verdict)) == (word == "undecided")
    failing = judge(claim(below=0.0), results([1.0, 1.1, 1.2, 1.3], flagged))
    assert failing is not None
    assert failing.word == {"holds": "fails"}.get(word, word)  # a failure that rests on them is capped, too


def test_one_counterexample_refutes_a_universal_claim() -> None:
    nearly = [0.0] * 19 + [1.0]  # violated on one seed of twenty: the mean is far below 0.5
    assert judge(claim(below=0.5), results(nearly)).word == "holds"  # type: ignore[union-attr]
    verdict = judge(claim(below=0.5, kind="universal"), results(nearly))
    assert verdict is not None
    assert verdict.word == "fails"
    assert verdict.numbers == "largest +1.0000, 20 seeds"
    assert verdict.wanted == "below 0.5 on every seed"
    assert judge(claim(below=0.5, kind="universal"), results([0.0])).word == "holds"  # type: ignore[union-attr]
    assert judge(claim(below=0.5, kind="universal"), results([0.0, math.nan])).word == "undecided"  # type: ignore[union-attr]
    assert judge(claim(above=0.5, kind="universal"), results([0.6, 0.5])).word == "fails"  # type: ignore[union-attr]


def test_identities_have_a_label_and_no_interval() -> None:
    verdict = judge(claim(below=1e-12, kind="exact"), results([0.0, 0.0]))
    assert verdict is not None
    assert verdict.word == "exact"
    assert "interval" not in str(verdict)
    assert verdict.p is None
    assert judge(claim(below=1e-12, kind="exact"), results([0.0, 1e-3])).word == "fails"  # type: ignore[union-attr]
    json.dumps(verdict.plain(), allow_nan=False)


@pytest.mark.parametrize(
    ("effects", "word"),
    [
        ([-0.01, 0.01, 0.0, 0.005], "holds"),  # the interval is inside of ±0.1
        ([-0.2, 0.2, -0.1, 0.15], "undecided"),  # no difference was found, but one could be there
        ([0.09, 0.11, 0.1, 0.1], "undecided"),  # at the margin
        ([0.5, 0.52, 0.51, 0.5], "fails"),
        ([-0.5, -0.52, -0.51, -0.5], "fails"),
        ([0.0], "undecided"),
    ],
)
def test_no_difference_needs_an_interval_inside_of_the_margin(effects: list[float], word: str) -> None:
    verdict = judge(claim(within=0.1), results(effects))
    assert verdict is not None
    assert verdict.word == word
    assert (verdict.p is not None and verdict.p <= 0.05) == (word != "undecided")
    assert verdict.wanted == "within ±0.1"


def test_p_values_agree_with_intervals_and_with_scipy() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        effects = rng.normal(0.5, 1, rng.integers(2, 9))
        low, high = over_seeds(effects).interval()
        assert (over_seeds(effects).p_value(0.0) <= 0.05) == (low > 0 or high < 0)
        assert over_seeds(effects).p_value(0.0) == pytest.approx(stats.ttest_1samp(effects, 0.0).pvalue)
    assert over_seeds(np.array([1.0, 1.0])).p_value(0.0) == 0.5  # the sign test
    assert over_seeds(np.array([1.0, 1.0])).p_value(1.0) == 1.0
    assert over_seeds(np.array([1.0, math.inf])).p_value(0.0) == 1.0


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # the textbook's example
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holms_correction_within_a_page() -> None:
    effects = [0.05, 0.35, 0.3, 0.5, 0.15]
    alone = judge_all([claim(above=0.0)], results(effects))[0]
    assert alone.p is not None
    assert 0.05 / 3 < alone.p < 0.05
    assert (alone.word, alone.adjusted) == ("holds", alone.p)
    page = [
        claim(above=0.0),
        claim(above=0.25),
        claim(above=0.3),
        claim(below=10.0),
        claim(below=5.0, kind="universal"),
    ]
    verdicts = judge_all(page, results(effects))
    assert [v.word for v in verdicts] == ["undecided", "undecided", "undecided", "holds", "holds"]
    assert verdicts[0].adjusted == pytest.approx(3 * alone.p)
    assert "Alone this claim holds; with Holm's correction for 4 claims it is undecided." in verdicts[0].notes
    assert "Holm p = " in verdicts[0].numbers
    assert verdicts[4].adjusted is None


def ladder(*rungs: list[float]) -> list[VariantResult]:
    found = []
    for seed in range(len(rungs[0])):
        height = 0.0
        for at in range(len(rungs) + 1):
            height += 0.0 if at == 0 else rungs[at - 1][seed]
            found.append(VariantResult(str(at), seed, {"length": 10.0**height}))
    return found


@pytest.mark.parametrize(
    ("rungs", "word"),
    [
        # Ordered means; noise is larger than a step on single seeds, so that the mean of the smallest steps is near 0.
        (([0.30, 0.31, 0.29, 0.33], [0.03, 0.09, 0.04, 0.08], [0.08, 0.04, 0.09, 0.03]), "holds"),
        (([0.30, 0.31, 0.29, 0.33], [0.05, -0.10, 0.03, 0.04], [0.2, 0.22, 0.2, 0.21]), "undecided"),
        (([0.30, 0.31, 0.29, 0.33], [-0.3, -0.31, -0.3, -0.29], [0.2, 0.22, 0.2, 0.21]), "fails"),
    ],
)
def test_ladders_are_judged_rung_by_rung(rungs: tuple[list[float], ...], word: str) -> None:
    claim = Ladder(tuple(map(str, range(4))), "rung").each("grows", "nowhere", "length", "length")
    verdict = judge(claim, ladder(*rungs))
    assert verdict is not None
    assert verdict.word == word
    assert np.isfinite([verdict.effect, verdict.low, verdict.high]).all()
    means = [float(np.mean(rung)) for rung in rungs]
    assert verdict.effect == pytest.approx(min(means))  # the weakest rung is reported


def test_seeds_without_the_premise_are_left_out() -> None:
    def met(n: Mapping[str, VariantResult]) -> bool:
        return n["a"].seed >= 3

    effects = [-1.0, -1.0, -1.0, 0.4, 0.5, 0.6]
    verdict = judge(claim(above=0.0, premise=met), results(effects))
    assert verdict is not None
    assert (verdict.word, verdict.seeds) == ("holds", 3)
    assert "met on 3 of 6 seeds" in verdict.notes[0]
    never = judge_all([claim(above=0.0, premise=lambda n: False)], results(effects))[0]
    assert (never.word, never.numbers, never.adjusted) == ("not tested", "premise not met on 6 seeds", None)
    json.dumps(never.plain(), allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "expected one of above, below and within; got none of them"),
        ({"above": 0.0, "below": 1.0}, "got above and below"),
        ({"within": 0.1, "kind": "exact"}, "got 'exact' with within"),
        ({"above": 0.1, "kind": "certain"}, "expected kind 'effect', 'exact' or 'universal'"),
    ],
)
def test_contradictory_claims_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        claim(**changes)


def test_other_images_can_undecide_a_claim() -> None:
    """Three seeds agree on an effect that the images shared by them produce."""
    draws = np.random.default_rng(0).normal(0, 0.2, 50)
    found = [
        replace(numbers(variant, seed, value), resamples={"margin_test": list(value + draws)} if shared else {})
        for seed in range(3)
        for variant, value, shared in (("a", 1.0, False), ("b", 1.2 + 0.01 * seed, True))
    ]
    with_images = judge(claim(above=0.0), found)
    alone = judge(claim(above=0.0), [replace(result, resamples={}) for result in found])
    assert with_images is not None
    assert alone is not None
    assert (alone.word, with_images.word) == ("holds", "undecided")
    assert "over seeds and images" in with_images.numbers
    assert "images" not in alone.numbers
    assert with_images.effect == alone.effect


def test_resamples_of_different_numbers_are_not_paired() -> None:
    found = [
        replace(numbers(variant, seed, 1.0 + seed), resamples={"margin_test": [1.0] * (3 + (variant == "b"))})
        for seed in range(3)
        for variant in "ab"
    ]
    verdict = judge(claim(above=0.0), found)
    assert verdict is not None
    assert not verdict.images
