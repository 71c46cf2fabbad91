"""Write docs/gallery.md: figure and verdicts of every results page, by paper. Run by `make gallery`; a test compares."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
GALLERY = ROOT / "docs/gallery.md"
PAPERS = {
    "Persistency of Excitation": "Persistency of excitation (Nar and Sastry)",
    "Richness of Training Data": "Richness of training data does not suffice (Nar and Sastry)",
    "What Training Reveals": "What training reveals about neural network complexity (Loukas, Poiitis and Jegelka)",
    "Training Invariances": "Training invariances and the low-rank phenomenon (Le and Jegelka)",
}
OTHERS = "Beyond the papers"
INTRO = """# Gallery of results

Every study with its figure and the verdicts on its claims: a claim **holds** or **fails** if the 95 % interval over seeds lies on one
side of its threshold, and is **undecided** otherwise; an identity is **exact**, and a claim whose premise is never met **not tested**. Each title leads to the numbers, the settings and the command that made them.
[How a claim is judged](studies.md#how-a-claim-is-judged).

*Written by `make gallery` from the results pages.*
"""


def entry(text: str) -> dict[str, str]:
    """Title, task, first figure and verdicts of a results page."""
    title = re.search(r"^# (.+)$", text, re.M)
    about = re.search(r"^\*(Study .+)\*$", text, re.M)
    figure = re.search(r"^!\[(.+?)\]\((.+?)\)$", text, re.M)
    verdicts = Counter(re.findall(r"^\| \*\*(holds|exact|fails|undecided|not tested)\*\* \|", text, re.M))
    if not (title and about and figure and verdicts):
        raise ValueError(f"not a results page: {text[:80]!r}")
    first = re.search(r"^\| \*\*([\w ]+)\*\* \| (.+) \([^|]+\) \| ", text, re.M)
    words = {
        "holds": ("holds", "hold"), "exact": ("exact", "exact"), "fails": ("fails", "fail"), "undecided": ("undecided", "undecided"),
        "not tested": ("not tested", "not tested"),
    }  # fmt: skip
    return {
        "title": title[1],
        "about": about[1],
        "alt": figure[1],
        "image": figure[2],
        "verdicts": ", ".join(f"{n} {words[name][n > 1]}" for name in words if (n := verdicts[name])),
        "first": f"{first[1].capitalize()}: {first[2]}." if first else "",
    }


def paper_of(about: str) -> str:
    """The heading that a study belongs under."""
    found = [heading for name, heading in PAPERS.items() if name.lower() in about.lower()]
    return found[0] if found else OTHERS


def gallery(pages: dict[str, str]) -> str:
    """The page, from the texts of the results pages by name."""
    by_paper: dict[str, list[str]] = {}
    for name, text in sorted(pages.items()):
        e = entry(text)
        by_paper.setdefault(paper_of(e["about"]), []).append(
            f"-   **[{e['title']}](results/{name}.md)**\n\n"
            f"    [![{e['alt']}](results/{e['image']}){{ loading=lazy }}](results/{name}.md)\n\n"
            f"    {e['about']}\n\n"
            f"    {e['first']}\n\n"
            f"    Claims: **{e['verdicts']}**.\n"
        )
    parts = [INTRO]
    for heading in (*PAPERS.values(), OTHERS):
        if heading in by_paper:
            cards = "\n".join(by_paper[heading])
            parts.append(f'## {heading}\n\n<div class="grid cards" markdown>\n\n{cards}\n</div>\n')
    return "\n".join(parts)


def results_pages() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md")}


if __name__ == "__main__":
    GALLERY.write_text(gallery(results_pages()), encoding="utf-8")
