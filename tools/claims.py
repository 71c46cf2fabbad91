"""Writes the claims' words into docs/results/*.md: source, the paper's sentence, and how what is tested compares with it.

python tools/claims.py           # after a claim's source, quote or strength has changed; then tools/published.py
python tools/claims.py --check   # exit status 1 if a page is out of date

Verdicts and numbers stay as they are: they change by running the study. A claim whose text or measure has changed is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs/results"
ROW = re.compile(r"^\| \*\*([^*]+)\*\* \| (.*?) \| (.*) \|$", re.MULTILINE)


def with_claims(text: str) -> str:
    """The results page with the words of its claims as in the registry."""
    from excite.studies import STUDIES
    from excite.studies.page import claim_cell
    from excite.studies.study import Claim

    head = re.search(r"^\*Study `([^`]+)` at scale `([^`]+)`", text, re.MULTILINE)
    if head is None:
        raise ValueError("not a results page: expected its study and scale")
    study = STUDIES[head[1]]
    left = list(study.claims(study.scales[head[2]]))

    def find(cell: str, numbers: str, claims: Sequence[Claim]) -> Claim:
        for claim in claims:
            if cell.startswith(f"{claim.text} (") and numbers.startswith(f"{claim.measure}: "):
                return claim
        raise ValueError(
            f"{study.name}: no claim of the registry is {cell.partition('<br>')[0]!r}, {numbers[:60]!r}: run it again"
        )

    def row(match: re.Match[str]) -> str:
        claim = find(match[2], match[3], left)
        left.remove(claim)
        return f"| **{match[1]}** | {claim_cell(claim)} | {match[3]} |"

    return ROW.sub(row, text)


if __name__ == "__main__":
    stale = []
    for page in sorted(PAGES.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = with_claims(before)
        if after != before:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(after, encoding="utf-8")
    if "--check" in sys.argv and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run tools/claims.py")
