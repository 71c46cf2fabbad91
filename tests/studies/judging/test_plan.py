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
from excite.studies.judging.plan import _power


def numbers_of(values: list[float], **limit: Any) -> Any:
    """A study with one claim on a number, and the file of its numbers."""
    claim = Claim("v is so", "not in the papers", "v", ("a",), lambda n: n["a"].v, **limit)
    study = experiment(
        "small-study", "A study", lambda settings, seed: {"v": 0.0}, {"a": {}}, [claim], measures={"v": "v"}
    )
    entries = [VariantResult("a", seed, {"v": value}).plain() for seed, value in enumerate(values)]
    stored = {"study": study.name, "scale": "quick", "numbers": entries, "verdicts": []}
    return study, stored


def plan(tmp_path: Path, values: list[float], **limit: Any) -> Any:
    study, stored = numbers_of(values, **limit)
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps(stored))
    return plan_seeds(study, file).claims[0]


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
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps(stored))
    found = plan_seeds(study, file)
    assert found.claims[0].reason == "more images are needed"
    assert "no claim can be decided by seeds" in str(found)


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
