"""Study `margin-layers`: its extra variants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from excite import studies
from excite.runs import load_run
from excite.studies.excitation.planes_and_horses import SCALES


@pytest.mark.slow
def test_extra_variants_train_and_have_claims(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCALES, "quick", replace(SCALES["quick"], epochs=1))
    result = studies.run("margin-layers", seeds=1, workers=1, variants="all", out=tiny / "all", docs=tiny / "docs")
    variants = [n.variant for n in result.numbers]
    assert variants[3:] == [
        "hidden layers excited", "dropout", "augmented data", "every layer excited, augmented data", "half the data", "twice the data",
        "adaptive optimizer",
    ]  # fmt: skip
    assert len(result.verdicts) == 11
    assert all(v.word == "undecided" for v in result.verdicts)  # one seed has no interval
    assert "--seeds 1 --variants all" in result.command
    assert (tiny / "docs/images/margin-layers-variants.png").exists()
    assert len(load_run(tiny / "all/half-the-data-0").series("loss/step")[0]) == 2
    assert len(load_run(tiny / "all/twice-the-data-0").series("loss/step")[0]) == 8
