"""Every study is registered, and has a page."""

from __future__ import annotations

from pathlib import Path

from excite import studies
from excite.studies.registry import STUDIES

ROOT = Path(__file__).parents[2]


def test_every_file_with_a_study_is_registered() -> None:
    folder = Path(studies.__file__).parent
    files = [path for path in folder.glob("*/*.py") if "\nSTUDY = Study(" in path.read_text()]
    assert len(files) == len(STUDIES)
    for path in files:
        assert path.stem.replace("_", "-") in STUDIES  # named like the study


def test_every_study_has_a_results_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for name in STUDIES:
        assert (ROOT / f"docs/results/{name}.md").exists()
        assert f"results/{name}.md" in nav
