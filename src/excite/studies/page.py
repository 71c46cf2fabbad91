"""The results page of a study, in Markdown: verdicts, figure, table, settings, command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from excite.studies.numbers import Numbers

if TYPE_CHECKING:
    from excite.studies.running import StudyResult

COLUMNS = {
    "accuracy_train": ("accuracy, training", "{:.1%}"),
    "accuracy_test": ("test", "{:.1%}"),
    "margin_train": ("median margin, training", "{:.4f}"),
    "margin_test": ("test", "{:.4f}"),
    "gap": ("gap", "{:.3f}"),
    "censored_test": ("never broken, test", "{:.1%}"),
    "suspect_test": ("suspect, test", "{:.1%}"),
}


def table(numbers: Sequence[Numbers]) -> list[list[str]]:
    """Headings, then one row an arm: means over seeds, with the range where there are several."""
    rows = [["trained", *(heading for heading, _ in COLUMNS.values()), "trusted"]]
    for arm in dict.fromkeys(found.arm for found in numbers):
        runs = [found for found in numbers if found.arm == arm]
        cells = [_mean([getattr(run, name) for run in runs], form) for name, (_, form) in COLUMNS.items()]
        rows.append([arm, *cells, f"{sum(not run.flags for run in runs)} of {len(runs)}"])
    return rows


def page(result: StudyResult, image: str, more: str | None = None) -> str:
    """The page, with the figure at `image` and the figure of all arms at `more`."""
    study, scale = result.study, result.study.scales[result.scale]
    lines = [
        f"# {study.title}",
        "",
        f"*Study `{study.name}` at scale `{scale.name}`: {study.figure}. CIFAR-10, planes against horses.*",
        "",
        f"![Margin curves: {study.title}]({image})",
        "",
        "Each curve is the share of images that some perturbation of at most that size gets misclassified, so it starts at the",
        "error and rises with ε; the lower it is, the more robust the network. Lines are means over seeds, bands reach from the",
        "lowest to the highest seed. Training tells about test where the left and the right curve of a colour are alike.",
        "",
        "## Verdicts",
        "",
        "| verdict | claim | effect, 95 % interval over seeds |",
        "| --- | --- | --- |",
        *(
            f"| **{v.word}** | {v.claim.text} ({v.claim.source}) | {v.claim.measure}: {v.numbers}; claimed {v.wanted} |"
            for v in result.verdicts
        ),
        "",
        "A claim holds if the whole interval lies on the claimed side, fails if it lies on the other, and is undecided else or",
        "where a network decides by chance. Effects are paired by seed; intervals are Student's t.",
        *(
            ["Scale `quick` is a first look: so few images and seeds decide large effects only."]
            * (scale.name == "quick")
        ),
        "",
    ]
    notes = list(dict.fromkeys(note for v in result.verdicts for note in v.notes))
    lines += [*(f"- {note}" for note in notes), *([""] if notes else [])]
    rows = table(result.numbers)
    lines += ["## Numbers", "", "| " + " | ".join(rows[0]) + " |", "| --- |" + " ---: |" * (len(rows[0]) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows[1:]]
    lines += [
        "",
        "Means over seeds, and the range. Accuracies are of all training and test images, the rest of those measured. The gap is",
        f"the largest vertical distance between the two curves; two sets of {scale.points} images from one distribution would show",
        f"about {_chance(scale.points):.3f}. *Never broken*: no perturbation within the pixel range was found. *Suspect*: the search for the",
        "margin shows signs of failure at these images. *Trusted*: networks for which nothing speaks against the margins.",
        "",
    ]
    if more is not None:
        lines += ["## All arms", "", f"![Gap and test margin of all arms]({more})", ""]
    if result.flags:
        lines += ["What speaks against margins:", "", *(f"- {flag}" for flag in result.flags), ""]
    lines += ["## Settings", "", f"- Scale `{scale.name}`: {scale.words}.", *(f"- {note}" for note in study.notes)]
    lines += [
        f"- Seeds {', '.join(map(str, result.seeds))}: initial weights and the order of the images. The images are the same.",
        "- Margins are found by a minimum-norm search in the infinity norm within [−1, 1]; see [Margins](../margins.md)."
        if image.startswith("images/")
        else "- Margins are found by a minimum-norm search in the infinity norm within [−1, 1].",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in result.versions.items())}.",
        "",
        "## Command",
        "",
        "```",
        "excite data fetch cifar10",
        result.command,
        "```",
        "",
    ]
    return "\n".join(lines)


def _mean(values: Sequence[float], form: str) -> str:
    if not all(math.isfinite(value) for value in values):
        return "not reached"
    text = form.format(float(np.mean(values)))
    if len(values) == 1 or form.format(min(values)) == form.format(max(values)):
        return text
    return f"{text} ({form.format(min(values))}–{form.format(max(values))})"


def _chance(points: int) -> float:
    from excite.report.curves import chance_gap

    return chance_gap(points, points)
