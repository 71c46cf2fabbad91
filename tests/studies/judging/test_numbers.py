"""Verdicts are found again from numbers.json, and from what stands beside a results page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from excite import studies
from excite.errors import InputError
from excite.studies import Claim, VariantResult, experiment
from excite.studies.judging.numbers import judge_again


def draw(settings, seed):
    return {"value": settings["at"] + math.sin(7 * seed) / 3}


CLAIM = Claim("b is larger", "nowhere", "b minus a", ("a", "b"), lambda n: n["b"].value - n["a"].value ** 2, above=0.0)
STUDY = experiment("pair", "A pair", draw, {"a": {"at": 0.0}, "b": {"at": 1.0}}, [CLAIM], measures={"value": "value"})


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> studies.StudyResult:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(studies.STUDIES, "pair", STUDY)
    return studies.run("pair", workers=1, docs="docs/results")


def test_the_same_verdicts_come_out(result: studies.StudyResult) -> None:
    judged = judge_again("pair")
    assert judged.file == Path("runs/studies/pair-quick/numbers.json")
    assert judged.verdicts == result.verdicts
    assert judged.changes == ()
    assert str(judged).endswith("all verdicts are as stored")
    assert "    the paper does not claim this: the claim is ours" in str(judged).splitlines()
    for file in ("runs/studies/pair-quick", "docs/results/pair.json"):
        again = judge_again("pair", file)
        assert [v.word for v in again.verdicts] == [v.word for v in result.verdicts]
        assert again.verdicts[0].effect == pytest.approx(result.verdicts[0].effect, rel=1e-6)


def test_a_scale_may_have_a_page_of_its_own(result: studies.StudyResult, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path("docs/results/pair.md").read_bytes()
    scales = {**STUDY.scales, "paper": replace(STUDY.scales["quick"], name="paper", own_page=True)}
    monkeypatch.setitem(studies.STUDIES, "pair", replace(STUDY, scales=scales))
    again = studies.run("pair", "paper", workers=1, docs="docs/results")
    assert Path("docs/results/pair.md").read_bytes() == page
    assert "images/pair-paper.png" in Path("docs/results/pair-paper.md").read_text()
    assert judge_again("pair", "docs/results/pair-paper.json").verdicts[0].word == again.verdicts[0].word


def test_the_published_file_is_small_and_has_a_line_per_seed(result: studies.StudyResult) -> None:
    text = Path("docs/results/pair.json").read_text()
    stored = json.loads(text)
    assert len(stored["numbers"]) == 10
    assert "settings" not in stored
    assert sum('"seed"' in line for line in text.splitlines()) == 10
    (result.folder / "numbers.json").unlink()
    assert judge_again("pair").file == Path("docs/results/pair.json")


def test_changed_numbers_change_the_verdict(result: studies.StudyResult) -> None:
    file = result.folder / "numbers.json"
    stored = json.loads(file.read_text())
    for entry in stored["numbers"]:
        entry["value"] = -1.0 - 0.01 * entry["seed"] if entry["arm"] == "b" else 0.0
    file.write_text(json.dumps(stored))
    judged = judge_again("pair")
    assert judged.changes == (("b is larger", "holds", "fails"),)
    assert "changed: b is larger (holds as stored, now fails)" in str(judged)
    for entry in stored["numbers"]:
        entry["flags"] = ["masked"]
    file.write_text(json.dumps(stored))
    assert judge_again("pair").verdicts[0].word == "undecided"


def test_chance_and_missing_numbers_survive_storing() -> None:
    plain = VariantResult("a", 0, {"v": math.inf}, by_chance=True).plain()
    assert plain == {"arm": "a", "seed": 0, "v": None, "flags": (), "by_chance": True}
    assert "by_chance" not in VariantResult("a", 0, {"v": 1.0}).plain()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"study": "pair"}', "is damaged"),
        ('{"study": "other", "scale": "quick", "numbers": [], "verdicts": []}', "numbers of 'other'; expected those of 'pair'"),
        ('{"study": "pair", "scale": "huge", "numbers": [], "verdicts": []}', "scale 'huge'; expected one of quick"),
        ('{"study": "pair", "scale": "quick", "numbers": [{"arm": "a"}], "verdicts": []}', "is damaged"),
        ('{"study": "pair", "scale": "quick", "numbers": [3], "verdicts": []}', "is damaged"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "numbers.json"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        judge_again(STUDY, file)


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"no numbers of pair in runs.*pair-quick.*, docs.*: run `excite study run pair`"
    ):
        judge_again(STUDY)
    with pytest.raises(InputError, match="expected 'quick'; got 'paper'"):
        judge_again(STUDY, scale="paper")
    with pytest.raises(InputError, match="does not exist"):
        judge_again(STUDY, "nowhere.json")


def test_published_numbers_give_the_published_verdicts() -> None:
    """Pages whose numbers are committed: their verdicts are those of the numbers."""
    root = Path(__file__).parents[3] / "docs/results"
    for file in sorted(root.glob("*.json")):
        judged = judge_again(json.loads(file.read_text())["study"], file)
        assert judged.changes == (), file.name
