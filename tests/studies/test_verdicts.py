"""Whether a claim holds, from the numbers of several seeds."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from excite.studies.study import Claim
from excite.studies.verdicts import judge, t_interval
from studies.small import numbers


def claim(**limit: float) -> Claim:
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
    inside = [low <= 1 <= high for low, high in (t_interval(rng.normal(1, 2, 5)) for _ in range(2000))]
    assert 0.93 < np.mean(inside) < 0.97
