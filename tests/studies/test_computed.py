"""Studies whose variants are functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from excite import studies
from excite.studies.computed import Computed, Outcome
from excite.studies.study import Claim, Scale, Study, Variant


def halves(settings: Mapping[str, Any], seed: int, on_progress: Callable[[float], None]) -> Outcome:
    on_progress(0.5)
    value = settings["start"] / 2 + seed
    return Outcome({"half": value}, [value], ("odd",) if seed else ())


def draw(study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Any) -> dict[str, Any]:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([detail[0] for detail in details["one"]])
    return {"figure": ("Halves", figure)}


def test_a_computed_study_goes_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Computed(halves, {"half": ("half", "{:.2f}")}, draw, "Read it.", "Below.")
    scales = {"quick": Scale(name="quick", seeds=2, words="two numbers")}
    claims = [
        Claim(
            "two is more",
            "nowhere",
            "two minus one",
            ("one", "two"),
            lambda n: n["two"].half - n["one"].half + n["one"].half / 1000,  # with a spread over seeds
            above=0.0,
        )
    ]
    study = Study(
        "halves", "Halves", "no figure", "numbers", method, scales,
        lambda scale: [Variant("one", {"start": 1}), Variant("two", {"start": 2})], lambda scale: claims,
    )  # fmt: skip
    monkeypatch.setitem(studies.STUDIES, "halves", study)
    monkeypatch.chdir(tmp_path)
    result = studies.run("halves", workers=1, docs="docs")
    assert [n.half for n in result.numbers] == [0.5, 1.5, 1.0, 2.0]
    assert result.verdicts[0].word == "undecided"  # half of the networks are flagged
    assert "the numbers of half or more of the networks of one are unreliable (1 of 2)" in str(result.verdicts[0])
    assert "the numbers of 1 of 2 networks" in str(result.verdicts[0])
    assert "one, odd" in (tmp_path / "docs/halves.md").read_text()
    stored = tmp_path / "runs/studies/halves-quick/one-0/result.json"
    before = stored.stat().st_mtime_ns
    studies.run("halves", workers=1)
    assert stored.stat().st_mtime_ns == before
    stored.write_text("{}")
    assert [n.half for n in studies.run("halves", workers=1).numbers] == [0.5, 1.5, 1.0, 2.0]
