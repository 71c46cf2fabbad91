"""Keys of papers and places in them."""

from __future__ import annotations

import pytest

from excite.errors import InputError
from excite.studies import STUDIES
from excite.studies.papers import PAPERS, Place, describe, find_paper, parse_place, short_references


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("persistency:6", Place("persistency", "figure", "6")),
        ("persistency:figure 6", Place("persistency", "figure", "6")),
        ("reveals:fig3b", Place("reveals", "figure", "3b")),
        ("trajectory:Figs. 3B", Place("reveals", "figure", "3b")),
        ("Invariances:thm-1", Place("invariances", "Theorem", "1")),
        ("persistency:7.2", Place("persistency", "section", "7.2")),
        ("invariances:appendix f", Place("invariances", "appendix", "F")),
        ("reveals:conclusion", Place("reveals", "conclusion")),
    ],
)
def test_places_are_read(text: str, place: Place) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("persistancy:6", "did you mean 'persistency'"),
        ("mnist:6", "expected one of persistency, richness, reveals, invariances"),
        ("reveals:", "expected PAPER:FIGURE such as 'reveals:1'"),
        ("reveals:x", "expected PAPER:FIGURE"),
        ("reveals:theorem", "expected PAPER:FIGURE"),
        ("reveals:table 3", "expected PAPER:FIGURE"),
        ("reveals:6:7", "expected PAPER:FIGURE"),
    ],
)
def test_what_is_no_place_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_place(text)


def test_a_figure_contains_its_panels() -> None:
    whole, panel = parse_place("reveals:3"), parse_place("reveals:3b")
    assert whole.covers(panel)
    assert panel.covers(whole)
    assert not panel.covers(parse_place("reveals:3c"))
    assert not parse_place("reveals:1").covers(parse_place("reveals:10"))
    assert not whole.covers(parse_place("persistency:3"))
    assert not whole.covers(parse_place("reveals:theorem 3"))


def test_descriptions_fit() -> None:
    places = [parse_place(f"reveals:{number}") for number in ("2", "3a", "3b", "4", "7a")]
    assert describe(places) == "figs 2, 3a, 3b, 4, 7a"
    assert describe(places, 14) == "figs 2-4, 7"
    mixed = [parse_place(f"persistency:{text}") for text in ("theorem 6", "equation 10", "equation 11", "section 2.1")]
    assert describe(mixed) == "Thm 6, eqs 10, 11, sec 2.1"
    assert describe(mixed, 13) == "Thm 6 …"
    sections = [parse_place(f"persistency:{text}") for text in ("1.1", "3.1", "5.2")]
    assert describe(sections, 13) == "secs 1.1 …"


def test_every_key_finds_its_paper() -> None:
    for paper in PAPERS.values():
        for key in (paper.key, *paper.aliases, paper.key.upper()):
            assert find_paper(key) is paper


def test_short_references_are_understood() -> None:
    for study in STUDIES.values():
        for place in study.places:
            assert parse_place(f"{place.paper}:{place.reference}") == place


def test_short_references_fit() -> None:
    places = [
        Place("persistency", "figure", "6"),
        Place("persistency", "Theorem", "2"),
        Place("richness", "figure", "2"),
    ]
    assert short_references(places, 40) == "persistency:6, thm2, richness:2"
    assert short_references(places, 30) == "persistency:6, thm2 …"
    assert short_references(places, 18) == "persistency:6 …"
    assert short_references(places[:1], 10) == "persisten…"
    assert short_references([], 10) == ""
