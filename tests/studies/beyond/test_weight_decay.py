"""Study `weight-decay`: what its variants differ in, and the whole path at a size for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from excite.studies import VariantResult
from excite.studies.beyond.weight_decay import DECAYED, EXCITED, PLAIN, SCALES, claims, variants
from excite.studies.judging.verdicts import judge
from excite.train.config import parse_config
from studies.small import run_tiny


def test_variants_differ_in_decay_or_excitation_only() -> None:
    configs = {v.name: parse_config({**v.config, "seed": 0, "device": "cpu"}) for v in variants(SCALES["quick"])}
    plain = configs[PLAIN]
    assert plain.excitation is None
    for decay, name in DECAYED.items():
        changed = plain.optimizer.model_copy(update={"weight_decay": decay})
        assert configs[name] == plain.model_copy(update={"optimizer": changed})
    assert configs[EXCITED] == plain.model_copy(update={"excitation": configs[EXCITED].excitation})


def test_excitation_is_compared_with_the_best_decay() -> None:
    margins = {PLAIN: 1.0, EXCITED: 2.0} | dict.fromkeys(DECAYED.values(), 1.5)
    last = claims(SCALES["quick"])[-1]

    def results(margins: dict[str, float]) -> list[VariantResult]:
        return [VariantResult(name, seed, {"margin_test": m}) for seed in range(6) for name, m in margins.items()]

    assert judge(last, results(margins)).word == "holds"  # type: ignore[union-attr]
    better = results({**margins, next(iter(DECAYED.values())): 3.0})
    assert judge(last, better).word == "fails"  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(SCALES["quick"], seeds=1, epochs=1, points=5, words="tiny")
    run_tiny("weight-decay", tiny, tmp_path, monkeypatch)
