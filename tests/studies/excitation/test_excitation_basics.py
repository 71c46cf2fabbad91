"""The experiments of section 1.1 against closed forms, plain loops and another way to the same limit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from excite import studies
from excite.studies.excitation import excitation_basics
from excite.studies.excitation.excitation_basics import SCALES


@pytest.mark.slow
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {**dict.fromkeys(SCALES["quick"].steps, 50), "node": 3}
    monkeypatch.setitem(SCALES, "quick", replace(SCALES["quick"], steps=steps, bandits=5, seeds=2))
    result = studies.run("excitation-basics", workers=1, out=tmp_path / "out")
    assert {found.variant for found in result.numbers} == {
        variant.name for variant in excitation_basics.variants(SCALES["quick"])
    }
    assert len(result.verdicts) == len(excitation_basics.claims(SCALES["quick"]))
    assert (tmp_path / "out/figure.png").stat().st_size < 300_000
    stored = json.loads((tmp_path / "out/numbers.json").read_text())
    assert stored["settings"]["arms"]["regression: attenuated quickly"]["alpha"] == 0.9
