"""The top of a page about runs: the verdict, the ranking, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from excite.probes.findings import Finding
from excite.report.collect import VariantRuns, differing
from excite.report.verdict.headline import Headline, headline
from excite.report.verdict.outcome import RunOutcome
from excite.report.verdict.ranking import rank
from excite.report.verdict.runs import outcome_of
from excite.runs.reader import Overview


def first_line(
    variants: Sequence[VariantRuns], overviews: Mapping[Path, Overview], worst: Finding | None = None
) -> tuple[Headline, list[RunOutcome]]:
    """The first line about the runs of a page, and what each variant achieved.

    Args:
        variants: The runs, by variant.
        overviews: The last values of each run, by its path.
        worst: The most important finding about the run, if there is one run.
    """
    outcomes = [outcome_of(variant, overviews) for variant in variants]
    paths = [str(run.path) for variant in variants for run in variant.runs]
    return headline(outcomes, worst, paths[0] if len(paths) == 1 else "RUN"), outcomes


def to_json(line: Headline, outcomes: Sequence[RunOutcome], variants: Sequence[VariantRuns]) -> dict[str, Any]:
    """Verdict, ranking and settings for a page.

    Returns:
        "verdict", the first line; "ranking", one row per run, the most robust first, empty for one run; "settings", rows
        (name, values) of the settings that differ.
    """
    several = len(outcomes) > 1
    return {
        "verdict": line.to_dict(),
        "ranking": [row.to_dict() for row in rank(outcomes)] if several else [],
        "settings": differing_settings(variants),
    }


def differing_settings(variants: Sequence[VariantRuns]) -> list[tuple[str, list[str]]]:
    """Settings that differ between variants, from the first run of each; seeds of runs of one variant are left out."""
    columns = [variant.runs[0].settings() for variant in variants]
    different = differing(columns)
    names = dict.fromkeys(name for column in columns for name in column if name in different)
    return [(name, [column.get(name, "–") for column in columns]) for name in names]
