"""How many seeds a claim needs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from excite.errors import InputError
from excite.studies import Claim, VariantResult, experiment, plan_seeds
from excite.studies.judging.intervals import over_seeds
from excite.studies.judging.numbers import judge_again
from excite.studies.judging.plan import _plan_claim, _power


def numbers_of(values: list[float], **limit: Any) -> Any:
    """A study with one claim on a number, and the file of its numbers."""
    claim = Claim("v is so", "not in the papers", "v", ("a",), lambda n: n["a"].v, **limit)
    study = experiment(
        "small-study", "A study", lambda settings, seed: {"v": 0.0}, {"a": {}}, [claim], measures={"v": "v"}
    )
    entries = [VariantResult("a", seed, {"v": value}).plain() for seed, value in enumerate(values)]
    stored = {"study": study.name, "scale": "quick", "numbers": entries, "verdicts": []}
    return study, stored


def written(folder: Path, stored: dict[str, Any]) -> Path:
    file = folder / "numbers.json"
    file.write_text(json.dumps(stored))
    return file


def plan(tmp_path: Path, values: list[float], **limit: Any) -> Any:
    study, stored = numbers_of(values, **limit)
    return plan_seeds(study, written(tmp_path, stored)).claims[0]


@pytest.mark.parametrize(
    ("limit", "word"), [({"above": 0.0}, "holds"), ({"below": 0.0}, "fails"), ({"within": 0.4}, "holds")]
)
def test_the_planned_number_decides_in_four_of_five_cases(tmp_path: Path, limit: dict[str, float], word: str) -> None:
    values = list(0.2 + 0.3 * (np.arange(10) - 4.5) / np.arange(10).std(ddof=1))
    planned = plan(tmp_path, values, **limit)
    assert planned.word == word
    rng = np.random.default_rng(0)
    decided = 0
    for _ in range(repeats := 2000):
        low, high = over_seeds(rng.normal(0.2, 0.3, planned.seeds)).interval()
        decided += (low > -0.4 and high < 0.4) if "within" in limit else low > 0
    assert 0.77 <= decided / repeats <= 0.87  # a whole number of seeds; 2.7 standard deviations of 2000 repeats
    fewer = planned.seeds - 1
    assert _power(0.2, 0.09, 0.0, [-0.4, 0.4] if "within" in limit else [0.0], fewer, 0.05) < 0.8


@pytest.mark.parametrize(
    ("values", "limit", "reason"),
    [
        ([0.1], {"above": 0.0}, "the spread is not known"),
        ([0.1, math.inf], {"above": 0.0}, "the spread is not known"),
        ([0.1, 0.3], {"above": 0.2}, "on the threshold"),
        ([1e-6, 0.3, -0.3], {"above": 0.0}, "more than 1000 seeds"),
        ([0.1, 0.3], {"above": 0.0, "kind": "universal"}, "not a matter of seeds"),
    ],
)
def test_what_no_number_of_seeds_decides(
    tmp_path: Path, values: list[float], limit: dict[str, Any], reason: str
) -> None:
    planned = plan(tmp_path, values, **limit)
    assert planned.seeds is None
    assert reason in str(planned)


def test_images_set_a_limit(tmp_path: Path) -> None:
    """Seeds agree, but other images would change the effect by more than it is."""
    study, stored = numbers_of([0.1, 0.11, 0.09], above=0.0)
    for entry in stored["numbers"]:
        entry["resamples"] = {"v": list(0.1 + np.random.default_rng(0).normal(0, 0.1, 50))}
    found = plan_seeds(study, written(tmp_path, stored))
    assert found.claims[0].reason == "more images are needed"
    assert "no claim can be decided by seeds" in str(found)


@pytest.mark.parametrize("claims", [1, 6])
def test_equal_numbers_are_counted_by_the_sign_test(tmp_path: Path, claims: int) -> None:
    study, stored = numbers_of([1.0] * 5, above=0.5)
    level = 0.05 / claims
    planned = _plan_claim(judge_again(study, written(tmp_path, stored)).verdicts[0], level, 0.8)
    assert planned.seeds is not None
    assert 2.0 ** (1 - planned.seeds) <= level < 2.0 ** (2 - planned.seeds)
    assert over_seeds(np.ones(planned.seeds)).p_value(0.5) <= level


@pytest.mark.parametrize("values", [[0.1, 0.3, 0.25, 0.2], [0.2] * 4])
def test_seeds_without_the_premise_come_on_top(tmp_path: Path, values: list[float]) -> None:
    """Half of the seeds meet it: twice as many are needed as where all of them do."""
    everywhere = plan(tmp_path, values, above=0.0)
    half = plan(tmp_path, [*values, *[-1.0] * len(values)], above=0.0, premise=lambda n: n["a"].v > 0)
    assert half.verdict.left_out == len(values)
    assert half.seeds == 2 * everywhere.seeds


def test_unreliable_numbers_are_no_matter_of_seeds(tmp_path: Path) -> None:
    study, stored = numbers_of([0.5, 0.6, 0.7], above=0.0)
    for entry in stored["numbers"]:
        entry["flags"] = ["the search failed"]
    found = plan_seeds(study, written(tmp_path, stored)).claims[0]
    assert (found.seeds, found.reason) == (None, "more reliable numbers are needed")


def test_far_effects_need_two_seeds() -> None:
    assert _power(1.0, 1e-6, 0.0, [0.0], 2, 0.05) > 0.99
    assert _power(1.0, 0.0, 0.0, [0.0], 2, 0.05) == 1.0


@pytest.mark.parametrize("power", [0.0, 1.0, "high", math.nan])
def test_a_power_that_is_none_is_refused(tmp_path: Path, power: Any) -> None:
    study, stored = numbers_of([0.1, 0.2], above=0.0)
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps(stored))
    with pytest.raises((InputError, TypeError), match="power"):
        plan_seeds(study, file, power=power)
