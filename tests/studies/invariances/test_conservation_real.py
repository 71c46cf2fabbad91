"""Study `conservation-real` at a size for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from excite.studies.invariances import conservation_real
from studies.small import nothing, run_tiny


def test_one_variant_of_the_real_study(tmp_path: Path) -> None:
    tiny = conservation_real.RealScale(
        name="quick", seeds=1, steps=4, data="digits", width=4, stages=1, batch=8, images=40, words=""
    )
    (variant,) = [variant for variant in conservation_real.variants(tiny) if variant.name == "transformer, AdamW"]
    outcome = conservation_real.compute(variant.config, 0, "cpu", tmp_path, nothing)
    assert outcome.values["rest"] < 1e-5 < outcome.values["drift"]
    assert outcome.values["rescaling"] > 0.5
    assert {law["law"] for law in outcome.detail["laws"]} == {"matrix", "channel", "norm"}
    steps, laws = zip(*outcome.detail["balance"])
    assert steps == (0, 1, 2, 3, 4)
    assert all(found.keys() == laws[0].keys() and min(found.values()) > 0 for found in laws)


@pytest.mark.slow
def test_the_whole_path_of_conservation_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = conservation_real.RealScale(
        name="quick", seeds=1, steps=3, data="digits", width=4, stages=1, batch=8, images=40, words="tiny"
    )
    run_tiny("conservation-real", tiny, tmp_path, monkeypatch)
