"""Brings the claims of docs/results/*.md up to date, without running a study.

python tools/claims.py           # after a claim or a rule has changed; then tools/published.py
python tools/claims.py --check   # exit status 1 if a page is out of date

Pages with numbers beside them (NAME.json) are judged again: verdicts and rules are those of the registry and of today. Of other pages
only the words change: source, the paper's sentence, and how what is tested compares with it; their verdicts change by running the study,
and a claim whose text or measure has changed is refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs/results"
ROW = re.compile(r"^\| \*\*([^*]+)\*\* \| (.*?) \| (.*) \|$", re.MULTILINE)


def judged_again(text: str, numbers: Path) -> tuple[str, bytes]:
    """The results page and its numbers with the verdicts found again from these numbers."""
    from excite.studies.judging.numbers import judge_again
    from excite.studies.page import verdict_lines
    from excite.studies.runner import published_numbers

    content = json.loads(numbers.read_text(encoding="utf-8"))
    judged = judge_again(content["study"], numbers)
    lines = "\n".join(verdict_lines(judged.verdicts, judged.scale))
    before, _, after = text.partition("## Verdicts\n")
    stored = {**content, "verdicts": [v.plain() for v in judged.verdicts]}
    return f"{before}{lines}\n## Numbers\n{after.partition('## Numbers' + chr(10))[2]}", published_numbers(stored)


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
        numbers = page.with_suffix(".json")
        before = page.read_text(encoding="utf-8")
        files = {page: with_claims(before).encode()}
        if numbers.exists():
            text, stored = judged_again(before, numbers)
            files = {page: text.encode(), **({numbers: stored} if text != before else {})}
        for file, content in files.items():
            if file.read_bytes() != content:
                stale.append(file.name)
                if "--check" not in sys.argv:
                    file.write_bytes(content)
    if "--check" in sys.argv and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run tools/claims.py")
