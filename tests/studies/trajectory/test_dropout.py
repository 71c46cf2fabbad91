"""Study `dropout` at a size for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from excite.studies.judging.verdicts import judge_all
from excite.studies.study import VariantResult
from excite.studies.trajectory import dropout
from studies.small import run_tiny


@pytest.mark.slow
def test_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(dropout.SCALES["quick"], steps=200, seeds=1)
    result = run_tiny("dropout", tiny, tmp_path, monkeypatch)
    words = {verdict.claim.text: verdict.word for verdict in result.verdicts}
    assert words[f"λ_steady is at least every local constant found, {dropout.TWO}"] == "fails"
    assert words["the program of Theorem 2 over the dropout patterns seen holds"] == "holds"
    for found in result.numbers:
        assert 0 < found.found <= found.product * (1 + 1e-9)


def test_infinite_constants_and_empty_bounds_test_nothing() -> None:
    values = {
        "steady": dropout.LARGEST,
        "found": 1.0,
        "product": 2.0,
        "violation": 0.5,
        "lemma4": 4.0,
        "difference": 0.1,
    }
    names = [variant.name for variant in dropout.variants(dropout.SCALES["quick"])]
    numbers = [VariantResult(name, seed, values) for name in names for seed in range(3)]
    words = {v.claim.text: v.word for v in judge_all(dropout.claims(dropout.SCALES["quick"]), numbers)}
    assert words["λ_steady is at least every local constant found, 2-4-1, two clouds"] == "not tested"
    assert words["λ_steady is below the product of norms, 2-4-1, two clouds"] == "not tested"
    assert next(word for text, word in words.items() if text.startswith("errors on training points")) == "not tested"
    finite = [replace(found, values={**values, "steady": 1.5, "lemma4": 0.5}) for found in numbers]
    words = {v.claim.text: v.word for v in judge_all(dropout.claims(dropout.SCALES["quick"]), finite)}
    assert words["λ_steady is at least every local constant found, 2-4-1, two clouds"] == "holds"
    assert next(word for text, word in words.items() if text.startswith("errors on training points")) == "holds"
