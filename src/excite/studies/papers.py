"""The papers, by short keys, and places in them: `persistency:6` is figure 6 of *Persistency of Excitation*."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from excite.errors import InputError


@dataclass(frozen=True)
class Paper:
    """A paper: its key on the command line, its title and other keys that are understood."""

    key: str
    title: str
    aliases: tuple[str, ...] = ()


PAPERS = {
    paper.key: paper
    for paper in (
        Paper("persistency", "Persistency of Excitation for Robustness of Neural Networks", ("excitation",)),
        Paper("richness", "Richness of Training Data Does Not Suffice", ("rank",)),
        Paper("reveals", "What Training Reveals about Neural Network Complexity", ("trajectory", "training-reveals")),
        Paper("invariances", "Training Invariances and the Low-Rank Phenomenon", ("invariance", "conservation-laws")),
    )
}
_BY_KEY = {key: paper for paper in PAPERS.values() for key in (paper.key, *paper.aliases)}

# The first of each row is the name, the second its abbreviation; the others are understood, too.
_KINDS = (
    ("figure", "fig", "figures", "figs", "f"),
    ("Theorem", "Thm", "theorems", "thms", "th"),
    ("Corollary", "Cor", "corollaries"),
    ("Lemma", "Lem", "lemmas"),
    ("equation", "eq", "equations", "eqs"),
    ("section", "sec", "sections", "secs", "s"),
    ("appendix", "app"),
    ("conclusion", "concl"),
)
_SPELLINGS = {word.lower(): kind[0] for kind in _KINDS for word in kind}
_SHORT = {kind[0]: kind[1] for kind in _KINDS}
KINDS = tuple(_SHORT)


@dataclass(frozen=True)
class Place:
    """A figure, statement or section of a paper.

    Args:
        paper: Key of the paper.
        kind: "figure", "Theorem", "section", ...
        number: Its number, with the letter of a panel if there is one: "3b"; empty for the conclusion.
    """

    paper: str
    kind: str
    number: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.number}".rstrip()

    @property
    def reference(self) -> str:
        """How it is written on the command line, without the paper: "6", "3b", "7.1", "thm4", "app-F"."""
        if self.kind == "figure" or (self.kind == "section" and "." in self.number):
            return self.number
        return f"{_SHORT[self.kind].lower()}{'-' if self.number.isalpha() else ''}{self.number}"

    def covers(self, other: Place) -> bool:
        """Whether one of the two contains the other: figure 3 contains 3b."""
        if (self.paper, self.kind) != (other.paper, other.kind):
            return False
        short, long = sorted((self.number, other.number), key=len)
        return long == short or (bool(short) and re.fullmatch(rf"{re.escape(short)}[a-z]", long) is not None)


def find_paper(key: str) -> Paper:
    """The paper with this key.

    Raises:
        InputError: If there is none.
    """
    result = _BY_KEY.get(key.strip().lower())
    if result is None:
        near = difflib.get_close_matches(key.strip().lower(), _BY_KEY, 1)
        hint = f"did you mean {_BY_KEY[near[0]].key!r}?" if near else f"expected one of {', '.join(PAPERS)}"
        raise InputError(f"unknown paper {key!r}: {hint}")
    return result


def parse_place(text: str) -> Place:
    """Reads a place such as "persistency:6", "reveals:figure 3b" or "invariances:theorem 1"; a bare number is a figure.

    Raises:
        InputError: If the paper is unknown or the rest is not a place.
    """
    key, _, rest = text.partition(":")
    paper = find_paper(key)
    match = re.fullmatch(r"([a-z]{2,}|[a-z](?=[\s.\d]))?[\s._-]*(\d+(?:\.\d+)*[a-z]?|[a-z])?", rest.strip().lower())
    word, number = (match[1] or "", match[2] or "") if match else ("", "")
    kind = _SPELLINGS.get(word) if word else "section" if "." in number else "figure"
    known = kind == "conclusion" if not number else kind == "appendix" or not number.isalpha()
    if match is None or kind is None or not known:
        raise InputError(
            f"{text!r} is not a place in a paper: expected PAPER:FIGURE such as '{paper.key}:1', or a statement such as "
            f"'{paper.key}:theorem 1'"
        )
    return Place(paper.key, kind, number.upper() if kind == "appendix" else number)


def describe(places: Sequence[Place], width: int = 100) -> str:
    """Places of one paper in a few characters: "figs 2-4, 7"; panels only where `width` allows, figures before the rest.

    Places that do not fit are left out and replaced by an ellipsis.
    """
    kinds = {kind: [place.number for place in group] for kind, group in groupby(places, key=lambda place: place.kind)}
    pieces = [_numbers(_SHORT[kind], numbers, panels=True) for kind, numbers in kinds.items()]
    if len(", ".join(pieces)) > width:
        pieces = [_numbers(_SHORT[kind], numbers, panels=False) for kind, numbers in kinds.items()]
    text = pieces[0]
    for number, piece in enumerate(pieces[1:], 2):
        if len(f"{text}, {piece}") + 2 * (number < len(pieces)) > width:
            return f"{text} …"
        text = f"{text}, {piece}"
    return text if len(text) <= width else f"{text[: width - 1].rpartition(', ')[0]} …"


def short_references(places: Sequence[Place], width: int) -> str:
    """Places as they are written on the command line, as many as fit: "persistency:6, richness:2", "reveals:5, 6, thm2"."""
    result: list[str] = []
    for before, place in zip([None, *places], places):
        new_paper = before is None or before.paper != place.paper
        result.append(f"{place.paper}:{place.reference}" if new_paper else place.reference)
    for count in range(len(result), 1, -1):
        text = ", ".join(result[:count]) + (" …" if count < len(result) else "")
        if len(text) <= width:
            return text
    text = f"{result[0]} …" if len(result) > 1 else "".join(result)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _numbers(word: str, numbers: Sequence[str], panels: bool) -> str:
    if not panels:
        numbers = list(dict.fromkeys(re.sub(r"(?<=\d)[a-z]$", "", number) for number in numbers))
    plural = "s" if len(numbers) > 1 and not word.endswith("s") else ""
    if all(number.isdigit() for number in numbers):
        runs = [
            [int(number) for _, number in run]
            for _, run in groupby(enumerate(numbers), key=lambda pair: int(pair[1]) - pair[0])
        ]
        shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    else:
        shown = list(numbers)
    return f"{word}{plural} {', '.join(shown)}".rstrip()
