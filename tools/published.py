"""Writes the verdicts of docs/results/*.md to src/excite/studies/published.json, which `excite study list` reads.

python tools/published.py           # after a results page has changed
python tools/published.py --check   # exit status 1 if the file is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "src/excite/studies/published.json"


def published() -> str:
    """The content of the file."""
    from excite.studies import STUDIES
    from excite.studies.overview import read_results_page

    pages = {
        page.stem: read_results_page(page.read_text(encoding="utf-8"))
        for page in sorted((ROOT / "docs/results").glob("*.md"))
        if page.stem in STUDIES  # not the pages of further scales
    }
    return json.dumps(pages, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        raise SystemExit(0 if FILE.read_text(encoding="utf-8") == published() else "published.json is out of date")
    FILE.write_text(published(), encoding="utf-8")
