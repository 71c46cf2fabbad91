"""Sections of the documentation that pages link to exist."""

import re
from pathlib import Path

import pytest

from excite.report.panels import PANELS
from excite.report.verdict import links as module
from excite.report.verdict.links import VARIABLE, docs_url

DOCS = Path(__file__).parents[3] / "docs"


def sections(page):
    heads = re.findall(r"^#+ (.+)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def linked():
    sources = [
        *Path(module.__file__).parents[1].rglob("*.py"),
        *Path(module.__file__).parents[2].glob("probes/**/*.py"),
    ]
    found = {
        name
        for file in sources
        for name in re.findall(r'"([a-z-]+\.md(?:#[a-z0-9-]+)?)"', file.read_text(encoding="utf-8"))
    }
    return sorted(found | {panel.docs for panel in PANELS if panel.docs})


@pytest.mark.parametrize("target", linked())
def test_linked_sections_exist(target):
    page, _, section = target.partition("#")
    assert (DOCS / page).is_file()
    assert not section or section in sections(page)


def test_addresses_on_a_site_and_without_one(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert docs_url("margins.md#search") == "docs/margins.md#search"
    assert docs_url("") == ""
    monkeypatch.setenv(VARIABLE, "https://example.org/excite/")
    assert docs_url("margins.md#search") == "https://example.org/excite/margins/#search"
    assert docs_url("margins.md") == "https://example.org/excite/margins/"
    monkeypatch.setenv(VARIABLE, "javascript:alert(1)")
    assert docs_url("margins.md") == "docs/margins.md"
