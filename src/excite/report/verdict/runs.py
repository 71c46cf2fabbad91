"""Outcomes of runs, from their folders and the last values of their metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from excite.report.collect import RunData, VariantRuns, watched_unit
from excite.report.verdict.outcome import SUMMARY, RunOutcome, displayed_status, from_latest, from_margins
from excite.runs.reader import Overview, read_overview
from excite.runs.weights import NAME as WEIGHTS

NAMES = (*SUMMARY, "margin/median", "loss/step")
SPARKS = ("margin_gap/median/test", "loss/step")  # the first that was measured
_MAX_CLASSES = 100_000


def overviews(variants: list[VariantRuns] | tuple[VariantRuns, ...], below: Path | None = None) -> dict[Path, Overview]:
    """The last values of all runs, by path; `below` as for `collect`."""
    return {run.path: read_overview(run.path, NAMES, SPARKS, below) for variant in variants for run in variant.runs}


def split_diverged(variants: Sequence[VariantRuns], below: Path | None = None) -> tuple[list[VariantRuns], list[str]]:
    """The variants without the runs that diverged, and a sentence on each run with margins that was left out for it."""
    sound, sentences = [], []
    for variant in variants:
        known = overviews([variant], below)
        statuses = {run.path: run_status(run, known[run.path]) for run in variant.runs}
        runs = tuple(run for run in variant.runs if statuses[run.path][0] != "diverged")
        if runs:
            sound.append(replace(variant, runs=runs))
        sentences += [
            f"{variant.name}: the run {run.path.name} diverged, so that its margins do not count: {statuses[run.path][1]}."
            for run in variant.runs
            if run not in runs and run.margins
        ]
    return sound, sentences


def outcome_of(variant: VariantRuns, overviews: Mapping[Path, Overview]) -> RunOutcome:
    """The outcome of the runs of one variant together.

    Args:
        variant: The runs; those that diverged are left out unless all did.
        overviews: The last values of each run, by its path.

    Returns:
        Margins that are stored in the runs, or the last that were measured while they trained.
    """
    statuses = {run.path: run_status(run, overviews[run.path]) for run in variant.runs}
    sound = [run for run in variant.runs if statuses[run.path][0] != "diverged"]
    runs = sound or list(variant.runs)
    status, reason = statuses[runs[0].path]
    known: dict[str, Any] = {
        "label": variant.name, "status": status, "reason": reason, "step": overviews[runs[0].path].step,
        "classes": classes(runs[0].wiring), "measurable": any(has_checkpoint(run.path) for run in runs),
        "note": next((run.note for run in runs if run.note), ""), "discrete": _is_discrete(runs[0].config),
    }  # fmt: skip
    means = {split: [run.accuracy[split] for run in runs if split in run.accuracy] for split in ("train", "test")}
    accuracy = {split: float(np.mean(values)) for split, values in means.items() if values}
    margins = {split: [run.margins[split] for run in runs if split in run.margins] for split in ("train", "test")}
    if any(margins.values()):
        return from_margins(margins, accuracy, **known)
    latest = from_latest(overviews[runs[0].path].latest, unit=watched_unit(runs[0].config), **known)
    return replace(latest, accuracy={**latest.accuracy, **accuracy})


def _is_discrete(config: Mapping[str, Any]) -> bool:
    """Whether a watched model takes whole numbers, such as token ids."""
    watched = config.get("watch")
    return isinstance(watched, dict) and watched.get("inputs") == "integers"


def run_status(run: RunData, overview: Overview) -> tuple[str, str | None]:
    """Status and reason of a run: "diverged" if it did."""
    return displayed_status(run.status, run.reason, overview)


def classes(wiring: Mapping[str, Any] | None) -> int | None:
    """Number of classes, from the outputs of the last layer; None if it is not known."""
    layers: Any = wiring["layers"] if wiring else ()
    try:
        outputs = int(str(layers[-1]["out"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return None
    return max(2, outputs) if outputs < _MAX_CLASSES else None


def has_checkpoint(path: Path) -> bool:
    """Whether a run has weights that can be measured: a checkpoint, or those of `watch(checkpoint=...)` and `Run.save`."""
    if (path / WEIGHTS).is_file():
        return True
    try:
        with os.scandir(path / "checkpoints") as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except OSError:
        return False
