"""The results page of a study, in Markdown: verdicts, figure, table, settings, command."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from excite.studies.judging.verdicts import Verdict
from excite.studies.study import Claim, VariantResult

if TYPE_CHECKING:
    from excite.studies.runner import StudyResult


def table(numbers: Sequence[VariantResult], columns: Mapping[str, tuple[str, str]]) -> list[list[str]]:
    """Headings, then one row per variant: means over seeds, with the range where there are several. Empty columns are left out."""
    columns = {name: label for name, label in columns.items() if any(name in number.values for number in numbers)}
    rows = [["", *(heading for heading, _ in columns.values()), "trusted"]]
    for variant in dict.fromkeys(number.variant for number in numbers):
        runs = [number for number in numbers if number.variant == variant]
        cells = [_mean([run.values.get(name) for run in runs], form) for name, (_, form) in columns.items()]
        rows.append([variant, *cells, f"{sum(not run.flags for run in runs)} of {len(runs)}"])
    return rows


def page(result: StudyResult, images: Mapping[str, tuple[str, str]], in_docs: bool) -> str:
    """The page. `images`: a sentence and the address of each figure, the study's own first."""
    study, scale = result.study, result.study.scales[result.scale]
    method = study.method
    (sentence, image), *others = images.values()
    lines = [
        f"# {study.title}",
        "",
        f"*Study `{study.name}` at scale `{scale.name}`: {study.figure}. {study.task}.*",
        "",
        f"![{sentence}]({image})",
        "",
        method.below_figure,
        "",
        *verdict_lines(result.verdicts, scale.name),
    ]
    rows = table(result.numbers, method.columns)
    lines += ["## Numbers", "", "| " + " | ".join(rows[0]) + " |", "| --- |" + " ---: |" * (len(rows[0]) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows[1:]]
    lines += ["", method.below_table(scale), ""]
    for sentence, image in others:
        lines += [f"## {sentence}", "", f"![{sentence}]({image})", ""]
    if result.flags:
        lines += ["Evidence against these numbers:", "", *(f"- {flag}" for flag in result.flags), ""]
    lines += ["## Settings", "", f"- Scale `{scale.name}`: {scale.words}.", *(f"- {note}" for note in study.notes)]
    lines += [f"- {_numbers(result.seeds).capitalize()}.", *seeds_line(len(result.seeds), scale.seeds)]
    lines += [f"- {line}" for line in method.settings]
    lines += [
        f"- {len(result.earlier)} of {len(result.numbers)} training runs were not repeated: their numbers are those of an earlier run with the same settings."
    ] * bool(result.earlier)
    lines += [f"- Not finished, and left out: {missing_seeds(result.missing)}."] * bool(result.missing)
    lines += [f"- Versions: {', '.join(f'{name} {version}' for name, version in result.versions.items())}.", ""]
    fetch = [f"excite data fetch {name}" for name in method.data]
    lines += ["## Command", "", "```", *fetch, result.command, "```", ""]
    text = "\n".join(lines)
    # Outside the documentation the other pages do not exist.
    return text if in_docs else text.replace("; see [Margins](../margins.md)", "").replace("](../", "](")


def missing_seeds(missing: Sequence[str]) -> str:
    """Entries "plain (seed 4)" by variant: "plain (seeds 4 to 9); dropout (seeds 2, 7)"."""
    seeds: dict[str, list[int]] = {}
    for entry in missing:
        variant, _, seed = entry.removesuffix(")").rpartition(" (seed ")
        seeds.setdefault(variant, []).append(int(seed))
    return "; ".join(f"{variant} ({_numbers(own)})" for variant, own in seeds.items())


def _numbers(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    consecutive = len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"seeds {seeds[0]} to {seeds[-1]}" if consecutive else f"seeds {', '.join(map(str, seeds))}"


def seeds_line(seeds: int, of: int) -> list[str]:
    """Says where a study ran with another number of seeds than its scale has."""
    return [f"- That is {seeds} seed{'s' if seeds != 1 else ''}; the scale has {of}."] * (seeds != of)


def verdict_lines(verdicts: Sequence[Verdict], scale: str) -> list[str]:
    """The section of a results page with verdicts, rules and notes."""
    lines = [
        "## Verdicts",
        "",
        "| verdict | claim | effect, 95 % interval over seeds |",
        "| --- | --- | --- |",
        *(
            f"| **{v.word}** | {claim_cell(v.claim)} | {v.claim.measure}: {v.numbers}; claimed {v.wanted} |"
            for v in verdicts
        ),
        "",
        *_rules(verdicts),
        *(
            ["Scale `quick` is preliminary: with so few images and seeds only large effects can be decided."]
            * (scale == "quick")
        ),
        "",
    ]
    notes = list(dict.fromkeys(note for v in verdicts for note in v.notes))
    return [*lines, *(f"- {note}" for note in notes), *([""] if notes else [])]


def claim_cell(claim: Claim) -> str:
    """The claim with its source, the paper's sentence and how the two compare."""
    quote = re.sub(r"([\\`*_\[\]|])", r"\\\1", claim.quote)
    paper = f"*“{quote}”*; " if quote else ""
    return f"{claim.text} ({claim.source})<br>{paper}{claim.reading}"


def _rules(verdicts: Sequence[Verdict]) -> list[str]:
    """How the verdicts were reached, as far as the page needs it."""
    lines = [
        "A claim holds if the whole interval lies on the claimed side of its threshold, fails if it lies on the other side, and is",
        "undecided otherwise, if the accuracy of a network is close to chance, or if the numbers of half of the networks of a variant",
        "are unreliable. Effects are paired by seed; intervals are Student's t.",
    ]
    if any(verdict.images for verdict in verdicts):
        lines += [
            "All seeds are measured on the same images: intervals *over seeds and images* also cover what other images would give, found by",
            "resampling them.",
        ]
    counted = sum(verdict.adjusted is not None for verdict in verdicts)
    if counted > 1:
        lines += [
            f"*Holm p* is the p-value with Holm's correction for the {counted} claims that are judged by an interval: a claim is decided",
            "where it is at most 0.05. Intervals are those of single claims.",
        ]
    if any(verdict.claim.within is not None for verdict in verdicts):
        lines.append(
            "A claim of no difference holds if the whole interval lies within the margin, which was chosen in advance."
        )
    kinds = {verdict.claim.kind for verdict in verdicts}
    if "exact" in kinds:
        lines.append("An identity is *exact* if every seed satisfies it up to rounding; it has no interval.")
    if "universal" in kinds:
        lines.append("A theorem or bound, claimed on every seed, fails on one counterexample; it has no interval.")
    if any(verdict.word == "not tested" for verdict in verdicts):
        lines.append("A claim is *not tested* where its premise is met on no seed.")
    return lines


def _mean(values: Sequence[float | None], form: str) -> str:
    result = [value for value in values if value is not None]
    if len(result) < len(values):
        return "–"
    if not all(math.isfinite(value) for value in result):
        return "not reached"
    text = form.format(float(np.mean(result)))
    if len(result) == 1 or form.format(min(result)) == form.format(max(result)):
        return text
    return f"{text} ({form.format(min(result))}–{form.format(max(result))})"
