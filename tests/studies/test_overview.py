"""The list and the page of a study on the terminal."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from excite.errors import InputError
from excite.studies import STUDIES, overview
from excite.studies.overview import (
    REFERENCE,
    estimate_minutes,
    list_lines,
    published_verdicts,
    read_results_page,
    show_lines,
    show_minutes,
    total_minutes,
    verdicts_so_far,
)

ROOT = Path(__file__).parents[2]


def stored(folder: Path, name: str, scale: str, words: list[str], **more: object) -> None:
    study = STUDIES[name]
    claims = study.claims(study.scales[scale])
    verdicts = [
        {"verdict": word, "text": claim.text, "source": claim.source, "effect": 0.25}
        for word, claim in zip(words, claims)
    ]
    place = folder / f"{name}-{scale}"
    place.mkdir(parents=True)
    content = {"scale": scale, "verdicts": verdicts, "settings": {"seeds": [0, 1]}, **more}
    (place / "numbers.json").write_text(json.dumps(content))


def test_every_study_states_its_place_question_and_cost() -> None:
    for name, study in STUDIES.items():
        assert study.asks, name
        assert len(study.asks) <= 28, name
        assert study.sources or "no figure" in study.figure, name
        for place in study.places:  # each can be read, and stands in the words of the page
            assert place.number in study.figure or name in ("margin-layers", "regularization"), name
        assert study.seconds["quick"] > 0, name


@pytest.mark.parametrize("height", [24, 30, 40, None])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_list_fits_one_screen(tmp_path: Path, width: int, height: int | None) -> None:
    lines = list_lines(STUDIES.values(), width, height, folder=tmp_path)
    assert len(lines) < (height or len(STUDIES) + 4)  # and the prompt
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["study", "paper:figure", "asks", "min", "verdict"]
    text = " ".join(lines)
    assert all(name in text for name in STUDIES)
    column = lines[0].index("paper:figure")
    for study in STUDIES.values():
        row = next((line for line in lines if line.startswith(f"{study.name} ")), None)
        if row is None:  # listed by name only
            assert height is not None
            assert all(place.kind != "figure" for place in study.places)
        else:
            assert row[column - 1] == " "
            assert study.asks in row
    row = next(line for line in lines if line.startswith("margin-layers "))
    assert "persistency:6" in row
    assert "4/2/3" in row  # of the results page


def test_the_list_without_a_height_has_one_line_for_each_study(tmp_path: Path) -> None:
    lines = list_lines(STUDIES.values(), 100, folder=tmp_path)
    assert {line.split()[0] for line in lines[1:-1]} == set(STUDIES)
    assert len(lines) == len(STUDIES) + 2
    assert "--all" not in lines[-1]


def test_the_list_of_one_paper(tmp_path: Path) -> None:
    lines = list_lines(STUDIES.values(), 100, 24, "richness", tmp_path)
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["hidden-rank", "richness:1"],
        ["margin-layers", "richness:2,"],
        ["random-perturbations", "richness:sec5,"],
        ["all-layer-gap", "richness:sec5"],
    ]
    beyond = list_lines(STUDIES.values(), 100, 24, "beyond", tmp_path)
    assert {line.split()[0] for line in beyond[1:-1]} == {s.name for s in STUDIES.values() if not s.places}
    with pytest.raises(InputError, match="did you mean 'richness'"):
        list_lines(STUDIES.values(), paper="richnes")


def test_own_verdicts_are_marked_and_explained(tmp_path: Path) -> None:
    stored(tmp_path, "boundaries", "quick", ["holds"])
    lines = list_lines(STUDIES.values(), 100, folder=tmp_path)
    assert next(line for line in lines if line.startswith("boundaries ")).endswith("1/0/0*")
    assert "* yours" in lines[-1]


def test_a_narrow_terminal_shortens_the_question(tmp_path: Path) -> None:
    lines = list_lines(STUDIES.values(), 60, folder=tmp_path)
    assert any("…" in line for line in lines)
    assert max(len(line) for line in lines) <= 60


def test_verdicts_of_the_user_come_before_the_published_ones(tmp_path: Path) -> None:
    study = STUDIES["boundaries"]
    published = verdicts_so_far(study, tmp_path)
    assert published is not None
    assert (str(published), published.scale, published.folder) == ("3/1/0", "paper", None)
    stored(tmp_path, "boundaries", "quick", ["holds", "undecided", "fails", "exact"])
    own = verdicts_so_far(study, tmp_path)
    assert own is not None
    assert (str(own), own.scale, own.seeds) == ("2/1/1*", "quick", 2)
    assert own.of(study.claims(study.scales["quick"])[2]) == ("fails", "+0.25")
    stored(tmp_path, "boundaries", "paper", ["holds"])
    assert str(verdicts_so_far(study, tmp_path)) == "1/0/0*"  # the larger scale
    (tmp_path / "boundaries-paper/numbers.json").write_text("{")
    assert str(verdicts_so_far(study, tmp_path)) == "2/1/1*"
    assert verdicts_so_far(replace(study, origin="mine.py", name="mine"), tmp_path) is None


def test_the_published_verdicts_are_those_of_the_results_pages() -> None:
    spec = importlib.util.spec_from_file_location("published", ROOT / "tools/published.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.FILE.read_text(encoding="utf-8") == tool.published(), "run python tools/published.py"
    assert set(published_verdicts()) == set(STUDIES)


def test_a_page_that_is_no_results_page_is_refused() -> None:
    with pytest.raises(ValueError, match="not a results page"):
        read_results_page("# Something else\n")


def test_minutes_follow_the_machine_and_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = replace(STUDIES["boundaries"], seconds={"quick": 240.0})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(overview, "calibrate", lambda: REFERENCE)
    assert estimate_minutes(study, folder=tmp_path) == pytest.approx(2.0)  # two workers
    monkeypatch.setattr(overview, "calibrate", lambda: 3 * REFERENCE)
    assert estimate_minutes(study, folder=tmp_path) == pytest.approx(6.0)  # a slower machine
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert estimate_minutes(study, folder=tmp_path) == pytest.approx(12.0)
    assert estimate_minutes(study, "paper", folder=tmp_path) is None
    assert total_minutes([study, study], folder=tmp_path) == pytest.approx(24.0)
    assert total_minutes([study, replace(study, seconds={})], folder=tmp_path) is None
    stored(tmp_path, "boundaries", "quick", ["holds"], seconds=90.0)
    assert estimate_minutes(study, folder=tmp_path) == pytest.approx(1.5)
    assert [show_minutes(value) for value in (None, 0.2, 1.4, 99.6)] == ["–", "<1", "1", "100"]


def test_all_quick_studies_take_at_most_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(overview, "calibrate", lambda: REFERENCE)  # the machine of `Study.seconds`
    together = total_minutes(STUDIES.values(), folder=tmp_path)
    assert together is not None
    assert together < 60
    assert f"sum {show_minutes(together)}." in " ".join(list_lines(STUDIES.values(), 100, folder=tmp_path))


def test_calibration_measures_this_machine() -> None:
    assert 0.001 < overview.calibrate() < 1.0


def test_a_study_is_shown_with_claims_and_verdicts(tmp_path: Path) -> None:
    for study in STUDIES.values():
        lines = show_lines(study, 100, tmp_path)
        assert max(map(len, lines)) <= 100
        text = " ".join(" ".join(lines).split())
        claims = study.claims(study.scales[published_verdicts()[study.name]["scale"]])
        for claim in claims:
            assert " ".join(claim.text.split()) in text
            assert " ".join(claim.quote.split()) in text
            assert claim.reading in text
        # Every claim stands on the results page with these words, unless a variant of it has no numbers yet.
        numbers = ROOT / f"docs/results/{study.name}.json"
        trained = {entry["arm"] for entry in json.loads(numbers.read_text())["numbers"]} if numbers.exists() else None
        untrained = [claim for claim in claims if trained is not None and not trained.issuperset(claim.variants)]
        assert text.count(" not judged ") == len(untrained)
        assert f"docs/results/images/{study.name}.png" in text
        assert "published" in text
    stored(tmp_path, "boundaries", "quick", ["holds", "fails"])
    lines = show_lines(STUDIES["boundaries"], 100, tmp_path)
    assert any("not judged" in line for line in lines)
    assert f"{tmp_path}/boundaries-quick/figure.png" in " ".join(lines)
