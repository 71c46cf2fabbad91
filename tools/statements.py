"""Writes the index of the papers' statements by number, and the tables of verdicts, from docs/theory/statements.toml.

python tools/statements.py                  # docs/theory/statements.md and the tables of docs/theory.md and docs/theory/PAPER.md
python tools/statements.py --check          # exit status 1 if one of them is out of date
python tools/statements.py --papers FOLDER  # compares the list of numbers with text copies of the papers, NAME.md
"""

from __future__ import annotations

import re
import sys
import tomllib
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
THEORY = ROOT / "docs/theory"
TABLE = THEORY / "statements.toml"
INDEX = THEORY / "statements.md"
TITLES = {
    "persistency": "Persistency of excitation",
    "richness": "Richness of hidden activations",
    "reveals": "What training reveals",
    "invariances": "Training invariances",
}
FILES = {
    "persistency": "persistency-of-excitation",
    "richness": "richness-of-hidden-activations",
    "reveals": "what-training-reveals",
    "invariances": "training-invariances",
}
VERDICTS = {
    "holds": "its proof was read, and no violation was found",
    "corrected": "false or not proved as printed; another form holds, and is the one implemented",
    "fails": "false, with a counterexample",
    "not proved": "its proof has a gap that could not be closed",
    "observed": "an experiment: a study remakes it and judges what the paper says about it",
    "defined": "a definition, assumption or notation",
    "in a proof": "an equation of a proof, judged with its statement",
    "drawing": "an illustration",
    "cited": "taken from another paper",
}
INTRO = """# Index by number

Every numbered statement, figure and equation of the four papers, with its verdict and where it stands in Excite. Numbers lead to the
section that explains the verdict. What the verdicts mean: [Theory](../theory.md).

*Written by `make statements` from `docs/theory/statements.toml`. Tests check that no number is missing and that every name exists.*
"""


@dataclass(frozen=True)
class Row:
    """A numbered statement, or a range of equations, figures or definitions."""

    place: str
    says: str
    verdict: str
    remark: str
    code: str
    heading: str
    study: str
    test: str

    @property
    def kind(self) -> str:
        return self.place.rpartition(" ")[0]

    @property
    def numbers(self) -> range:
        first, _, last = self.place.rpartition(" ")[2].partition("-")
        return range(int(first), int(last or first) + 1)


def numbers() -> dict[str, dict[str, range]]:
    """By paper and kind: the numbers that the paper uses."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))["numbers"]
    return {
        paper: {kind: Row(f"{kind} {span}", *[""] * 7).numbers for kind, span in kinds.items()}
        for paper, kinds in found.items()
    }


def rows() -> dict[str, list[Row]]:
    """By paper: the rows of the table."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    return {paper: [Row(*row) for row in table] for paper, table in found.items()}


def slug(heading: str) -> str:
    """The anchor of a heading, as mkdocs makes it."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _link(row: Row, page: str = "") -> str:
    """The number, on one line, as a link to the section that explains it."""
    return f"[{row.place.replace('-', '–').replace(' ', '&nbsp;')}]({page}#{slug(row.heading)})"


def index() -> str:
    """The page of all numbers."""
    lines = [INTRO]
    for paper, table in rows().items():
        lines += [
            f"## {TITLES[paper]}",
            "",
            "| number | statement | verdict | code, study and test |",
            "| --- | --- | --- | --- |",
        ]
        for row in table:
            says = f"{row.says}; *{row.remark}*" if row.remark else row.says
            where = [
                f"`{row.code}`" if row.code else "",
                f"[study {row.study}](../results/{row.study}.md)" if row.study else "",
                f"`{row.test.rpartition('::')[2].removeprefix('tests/')}`" if row.test else "",
            ]
            cells = (_link(row, f"{paper}.md"), says, f"**{row.verdict}**", "<br>".join(filter(None, where)))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def verdicts(paper: str) -> str:
    """The table at the top of a paper's page: what can be true or false."""
    lines = ["", "| number | statement | verdict | what holds, and where it fails |", "| --- | --- | --- | --- |"]
    for row in rows()[paper]:
        if row.kind not in ("equation", "figure") and row.verdict not in ("defined", "drawing", "in a proof"):
            cells = (
                _link(row),
                row.says,
                f"**{row.verdict}**",
                row.remark,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def overview() -> str:
    """Verdicts by paper, and what they mean."""
    found = {paper: Counter(row.verdict for row in table if row.kind != "equation") for paper, table in rows().items()}
    lines = ["", "| verdict | " + " | ".join(f"[{TITLES[p]}](theory/{p}.md)" for p in found) + " | meaning |"]
    lines.append("| --- |" + " ---: |" * len(found) + " --- |")
    for verdict, words in VERDICTS.items():
        lines.append(f"| **{verdict}** | " + " | ".join(str(found[p][verdict] or "–") for p in found) + f" | {words} |")
    return "\n".join([*lines, ""])


def filled(text: str) -> str:
    """A page with the tables between its marks written anew."""

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{overview() if match[2] == 'overview' else verdicts(match[2])}\n<!-- end -->"

    return re.sub(r"(<!-- statements: (\w+) -->\n).*?<!-- end -->", block, text, flags=re.DOTALL)


def pages() -> dict[Path, str]:
    """All pages that are written, with their contents."""
    marked = [ROOT / "docs/theory.md", *(THEORY / f"{paper}.md" for paper in TITLES)]
    return {INDEX: index()} | {page: filled(page.read_text(encoding="utf-8")) for page in marked}


def missing_from(folder: Path) -> list[str]:
    """Numbers in text copies of the papers that the list does not have."""
    found = []
    for paper, name in FILES.items():
        text = (folder / f"{name}.md").read_text(encoding="utf-8")
        kinds = (
            "Theorem|Corollary|Lemma|Proposition|Definition|Remark|Assumption|Algorithm|Claim|Observation|Figure|Table"
        )
        places = {(kind, int(n)) for kind, n in re.findall(rf"^[\W_]*({kinds})[ *]+(\d+)", text, re.MULTILINE)}
        places |= {
            ("equation", int(n)) for n in re.findall(r"(?:\\tag\{|\\quad \(|^ ?\()(\d+)[a-z]?[)}]", text, re.MULTILINE)
        }
        for kind, number in sorted(places):
            listed = numbers()[paper].get("figure" if kind == "Figure" else kind, range(0))
            if number not in listed:
                found.append(f"{paper}: {kind} {number}")
    return found


if __name__ == "__main__":
    if "--papers" in sys.argv:
        raise SystemExit("\n".join(missing_from(Path(sys.argv[sys.argv.index("--papers") + 1]))) or 0)
    stale = [page for page, text in pages().items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        raise SystemExit(f"out of date: {', '.join(p.name for p in stale)}; run tools/statements.py" if stale else 0)
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
