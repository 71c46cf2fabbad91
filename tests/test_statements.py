"""The index of the papers' statements: no number is missing, and every name on it exists."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("statements", ROOT / "tools/statements.py")
assert _spec is not None
assert _spec.loader is not None
statements = importlib.util.module_from_spec(_spec)
__import__("sys").modules["statements"] = statements  # dataclasses look their module up
_spec.loader.exec_module(statements)
ROWS = statements.rows()
ALL = [pytest.param(paper, row, id=f"{paper} {row.place}") for paper, rows in ROWS.items() for row in rows]


@pytest.mark.parametrize("paper", statements.TITLES)
def test_every_numbered_statement_has_a_row(paper):
    listed = {(kind, number) for kind, span in statements.numbers()[paper].items() for number in span}
    found = [(row.kind, number) for row in ROWS[paper] for number in row.numbers]
    assert set(found) == listed
    assert len(found) == len(set(found)), "a number has two rows"


def test_the_list_has_the_papers_statements():
    """The main ones, written down a second time."""
    numbers = {
        paper: {kind: len(span) for kind, span in kinds.items()} for paper, kinds in statements.numbers().items()
    }
    assert {paper: kinds["Theorem"] for paper, kinds in numbers.items()} == {
        "persistency": 6, "richness": 2, "reveals": 3, "invariances": 2,
    }  # fmt: skip
    assert (numbers["reveals"]["Lemma"], numbers["invariances"]["Lemma"], numbers["invariances"]["equation"]) == (
        6,
        10,
        90,
    )


def resolve(name):
    """The object with this dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize(("paper", "row"), ALL)
def test_every_name_of_a_row_exists(paper, row):
    from excite.studies import STUDIES

    assert row.verdict in statements.VERDICTS
    assert row.says
    if row.code:
        assert row.code.startswith("excite.")
        resolve(row.code)
    if row.study:
        assert row.study in STUDIES
        assert (ROOT / f"docs/results/{row.study}.md").exists()
    headings = re.findall(r"^#+ (.*)$", (ROOT / f"docs/theory/{paper}.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings.count(row.heading) == 1, row.heading
    file, _, name = row.test.partition("::")
    if file:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE), row.test


@pytest.mark.parametrize(("paper", "row"), ALL)
def test_what_is_said_to_fail_is_shown_by_a_test(paper, row):
    if row.verdict in ("corrected", "fails", "not proved"):
        assert row.test, f"{paper}: {row.place} has no test"
    if row.verdict == "observed":
        assert row.study, f"{paper}: {row.place} has no study"
    if row.kind in ("Theorem", "Corollary", "Lemma"):
        assert row.verdict in ("holds", "corrected", "fails", "not proved", "cited")
        assert row.test
        assert row.code


def test_the_pages_are_up_to_date():
    for page, text in statements.pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run tools/statements.py"


def test_text_copies_of_papers_are_compared(tmp_path):
    for name in statements.FILES.values():
        (tmp_path / f"{name}.md").write_text(
            "**Theorem 1** ...\n$$x \\tag{3}$$\nLemma 12 (New). ...\n", encoding="utf-8"
        )
    found = statements.missing_from(tmp_path)
    assert "reveals: Lemma 12" in found
    assert not any("Theorem" in place or "equation" in place for place in found)


def test_the_citation_names_the_theory():
    assert "docs/theory.md" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
