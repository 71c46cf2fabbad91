"""Output of `excite study list` and `excite study show`: where a study stands in the papers, what it costs, what came out."""

from __future__ import annotations

import json
import os
import re
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from excite.jobs.job import single_thread
from excite.studies.computed import Computed, Jointly
from excite.studies.papers import KINDS, PAPERS, Place, find_paper, short_references
from excite.studies.study import Claim, Study

RUNS = Path("runs/studies")
REFERENCE = 0.0172  # seconds of `calibrate` on the machine of `Study.seconds`, one core of a server of 2023
_PUBLISHED = Path(__file__).with_name("published.json")  # written by tools/published.py from the results pages
BEYOND = "beyond"  # for studies that are in no paper


@dataclass(frozen=True)
class StudyStatus:
    """Verdicts on the claims of a study so far.

    Args:
        scale: The scale at which they were found.
        seeds: The number of seeds.
        verdicts: Word and numbers of each, by the text of the claim with its source.
        folder: The user's results; None for the published ones.
    """

    scale: str
    seeds: int
    verdicts: Mapping[str, tuple[str, str]]
    folder: Path | None = None

    def __str__(self) -> str:
        """Holds, fails and the rest: "6/2/1", with an asterisk if they are the user's own."""
        words = Counter(word for word, _ in self.verdicts.values())
        holds, fails = words["holds"] + words["exact"], words["fails"]
        return f"{holds}/{fails}/{words.total() - holds - fails}{'' if self.folder is None else '*'}"

    def of(self, claim: Claim) -> tuple[str, str]:
        """The verdict on a claim and its numbers."""
        return self.verdicts.get(claim_key(claim), ("not judged", ""))


def claim_key(claim: Claim) -> str:
    """Identifies a claim in the published results."""
    return f"{claim.text} ({claim.source})"


def verdicts_so_far(study: Study, folder: Path = RUNS) -> StudyStatus | None:
    """The user's verdicts at the largest scale that was run, else the published ones; None if there are none."""
    for scale in reversed(list(study.scales)):
        place = folder / f"{study.name}-{scale}"
        result = _read_json(place / "numbers.json")
        if isinstance(result, dict) and result.get("verdicts"):
            return _stored_status(result, place)
    published = published_verdicts().get(study.name) if not study.origin else None
    if published is None:
        return None
    verdicts = {text: (word, numbers) for word, text, numbers in published["verdicts"]}
    return StudyStatus(published["scale"], published["seeds"], verdicts)


def _stored_status(stored: Mapping[str, Any], folder: Path) -> StudyStatus:
    verdicts = {}
    for verdict in stored["verdicts"]:
        shown = "" if verdict.get("effect") is None else f"{verdict['effect']:+.4g}".replace("-", "−")
        verdicts[f"{verdict['text']} ({verdict['source']})"] = (str(verdict["verdict"]), shown)
    return StudyStatus(str(stored["scale"]), len(stored["settings"]["seeds"]), verdicts, folder)


@cache
def published_verdicts() -> dict[str, Any]:
    """By study: scale, number of seeds and verdicts of the results page in the documentation."""
    result: dict[str, Any] = _read_json(_PUBLISHED) or {}
    return result


def read_results_page(text: str) -> dict[str, Any]:
    """Scale, number of seeds and verdicts (word, claim with source, numbers) of a results page."""
    scale = re.search(r"^\*Study `[^`]+` at scale `([^`]+)`", text, re.MULTILINE)
    seeds = re.search(r"^- Seeds? ([\d, ]+|\d+ to \d+)\.$", text, re.MULTILINE)
    rows = re.findall(r"^\| \*\*([^*]+)\*\* \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    if scale is None or seeds is None or not rows:
        raise ValueError("not a results page: expected its scale, seeds and verdicts")
    verdicts = [[word, claim.partition("<br>")[0], numbers] for word, claim, numbers in rows]
    first, _, last = seeds[1].partition(" to ")
    count = int(last) - int(first) + 1 if last else len(first.split(","))
    return {"scale": scale[1], "seeds": count, "verdicts": verdicts}


@cache
def calibrate() -> float:
    """Seconds of one core for a fixed piece of work: convolutions, products of matrices and many small operations."""
    generator = torch.Generator().manual_seed(0)
    images, kernel = torch.randn(64, 16, 16, 16, generator=generator), torch.randn(16, 16, 3, 3, generator=generator)
    matrix, vector = torch.randn(256, 256, generator=generator), torch.zeros(16)
    best = float("inf")
    with single_thread(), torch.no_grad():
        for _ in range(5):
            start = time.thread_time()
            for _ in range(4):
                torch.nn.functional.conv2d(images, kernel, padding=1).relu_()
                matrix @ matrix
            for _ in range(2000):
                vector = vector + 1
            best = min(best, time.thread_time() - start)
    return best


def estimate_minutes(study: Study, scale: str = "quick", workers: int = 2, folder: Path = RUNS) -> float | None:
    """About how many minutes a scale takes on this machine with its own number of seeds; None if that is not known.

    The duration of an earlier run in this folder, else `study.seconds` times how much slower this machine is than the one they were
        measured on, divided by the workers that have a core.
    """
    stored = _read_json(folder / f"{study.name}-{scale}" / "numbers.json")
    if isinstance(stored, dict) and isinstance(stored.get("seconds"), int | float):
        return float(stored["seconds"]) / 60
    if scale not in study.seconds:
        return None
    if isinstance(study.method, Computed) and isinstance(study.method.compute, Jointly):
        workers = 1  # one ensemble in one process
    return study.seconds[scale] * calibrate() / REFERENCE / min(workers, os.cpu_count() or 1) / 60


def total_minutes(studies: Iterable[Study], scale: str = "quick", folder: Path = RUNS) -> float | None:
    """About how many minutes all studies take one after another at a scale; None if that of one is not known.

    Training runs that several of them share count for each, though in `runs/studies` they are trained once.
    """
    minutes = [estimate_minutes(study, scale, folder=folder) for study in studies]
    known = [value for value in minutes if value is not None]
    return sum(known) if len(known) == len(minutes) else None


def show_minutes(minutes: float | None) -> str:
    """Minutes in a few characters: "<1", "12", "–" if they are not known."""
    return "–" if minutes is None else "<1" if minutes < 0.75 else f"{minutes:.0f}"


def list_lines(
    studies: Iterable[Study], width: int = 80, height: int | None = None, paper: str | None = None, folder: Path = RUNS
) -> list[str]:
    """The list of studies, one line each, in the order of papers and figures.

    Args:
        studies: The studies.
        width: Columns of the terminal.
        height: Rows of the terminal. If one line each does not fit, the studies without a figure are listed by name only.
            None: any number of rows.
        paper: Only those of this paper, by its key, or `BEYOND` for those that are in none. Default: all.
        folder: Results of the user's own runs.

    Returns:
        The lines, the last of which explain them.
    """
    rows = _ordered(studies, paper)
    table = _table(rows, width, folder)
    together = total_minutes([study for study, _ in rows], folder=folder)
    lines = table + _legend(table, together, width, "excite study show NAME")
    if height is None or len(lines) < height:  # one row is for the prompt
        return lines
    figures = [row for row in rows if any(place.kind == "figure" for place in row[1])]
    rest: dict[str, list[str]] = {}
    for study, places in rows:
        if study not in [row[0] for row in figures]:
            rest.setdefault(f"more of {places[0].paper}" if places else "not in the papers", []).append(study.name)
    lines = _table(figures, width, folder)
    for heading, names in rest.items():
        lines += textwrap.wrap(
            f"{heading}: {', '.join(names)}", width, subsequent_indent="    ", break_on_hyphens=False
        )
    return lines + _legend(table, together, width, "study list --all")


def _legend(table: Sequence[str], together: float | None, width: int, more: str) -> list[str]:
    own = ", * yours" if any(line.endswith("*") for line in table) else ""
    text = f"min: scale quick, sum {show_minutes(together)}. verdict: hold/fail/undecided{own}. More: {more}"
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _table(rows: Sequence[tuple[Study, list[Place]]], width: int, folder: Path) -> list[str]:
    """A line of headings and one for each study."""
    name = max(map(len, ["study", *(study.name for study, _ in rows)]))
    gap = "  " if width >= 90 else " "
    free = width - name - 11 - 4 * len(gap)  # for paper and figure, and for the question; minutes and verdicts take 11
    asks = max(12, min(28, free - 12))
    where = max(8, min(40, free - asks))
    form = gap.join((f"{{:<{name}}}", f"{{:<{where}}}", f"{{:<{asks}}}", "{:>3}", "{}"))
    lines = [form.format("study", "paper:figure", "asks", "min", "verdict")]
    for study, places in rows:
        status = verdicts_so_far(study, folder)
        cells = (
            study.name,
            short_references(places, where),
            study.asks if len(study.asks) <= asks else f"{study.asks[: asks - 1]}…",
            show_minutes(estimate_minutes(study, folder=folder)),
            "–" if status is None else str(status),
        )
        lines.append(form.format(*cells).rstrip())
    return lines


def _ordered(studies: Iterable[Study], paper: str | None) -> list[tuple[Study, list[Place]]]:
    """Studies with their places, by paper and within it by figure; those that are in no paper last.

    With a paper its studies only, each with its places in that paper first.
    """
    papers = list(PAPERS)
    if paper == BEYOND:
        return [(study, []) for study in studies if not study.places]
    if paper is not None:
        paper = find_paper(paper).key
        papers = [paper, *(key for key in papers if key != paper)]

    def position(place: Place) -> tuple[Any, ...]:
        return papers.index(place.paper), *_position(place)

    rows = [(study, sorted(study.places, key=position)) for study in studies]
    if paper is not None:
        rows = [(study, places) for study, places in rows if places and places[0].paper == paper]
    in_papers = sorted((row for row in rows if row[1]), key=lambda row: position(row[1][0]))
    return in_papers + [row for row in rows if not row[1]]


def _position(place: Place) -> tuple[int, list[int]]:
    return list(KINDS).index(place.kind), [int(digits) for digits in re.findall(r"\d+", place.number)]


def show_lines(study: Study, width: int = 100, folder: Path = RUNS) -> list[str]:
    """All about a study: places, scales, variants, claims with their verdicts, results."""
    status = verdicts_so_far(study, folder)
    name = status.scale if status and status.scale in study.scales else next(iter(study.scales))
    items = [("where", study.figure), ("asks", study.asks), ("task", study.task)]
    items += [("data", f"{name} (excite data fetch {name})") for name in study.method.data]
    items += [("scale", _describe_scale(study, name, folder)) for name in study.scales]
    variants = study.variants(study.scales[name])
    items.append(("variants", "; ".join(variant.name for variant in variants if not variant.extra)))
    if any(variant.extra for variant in variants):
        items.append(("extra", f"{'; '.join(v.name for v in variants if v.extra)} (with --variants all)"))
    items += [("note", note) for note in study.notes]
    place = f"docs/results/{study.name}.md, docs/results/images/{study.name}.png"
    if status is not None:
        own = status.folder
        items.append(("results", place if own is None else f"{own}/results.md, {own}/figure.png"))
    items.append(("run", f"excite study run {study.origin or study.name}"))
    lines = [f"{study.name}: {study.title}"]
    for key, text in items:
        lines += _wrapped(f"  {key:<9} ", text, width)
    lines += ["", f"claims{_where_from(status)}"]
    for number, claim in enumerate(study.claims(study.scales[name]), 1):
        word, numbers = status.of(claim) if status else ("not judged", "")
        lines += _wrapped(f"  {number:>2}  {word:<10}  ", claim.text, width)
        quote = f"the paper: “{claim.quote}”" if claim.quote else ""
        for text in (numbers or claim.measure, claim.source, quote, claim.reading):
            lines += _wrapped(" " * 18, text, width) if text else []
    return lines


def _describe_scale(study: Study, name: str, folder: Path) -> str:
    scale = study.scales[name]
    minutes = show_minutes(estimate_minutes(study, name, folder=folder))
    about = f"about {minutes} min on this machine, " if minutes != "–" else ""
    return f"{name}: {about}{scale.seeds} seed{'s' if scale.seeds != 1 else ''}; {scale.words}"


def _wrapped(prefix: str, text: str, width: int) -> list[str]:
    indent = " " * len(prefix)
    return textwrap.wrap(
        prefix + text, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _where_from(status: StudyStatus | None) -> str:
    if status is None:
        return ", not judged yet"
    seeds = f"{status.seeds} seed{'s' if status.seeds != 1 else ''}"
    whose = "published" if status.folder is None else f"yours in {status.folder}"
    return f", verdicts at scale {status.scale} with {seeds} ({whose})"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
