"""The report as one self-contained HTML file that opens from disk and fetches nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from excite._core.compatibility import renamed_attribute
from excite._core.files import write_bytes, writing
from excite._version import __version__
from excite.report import figures
from excite.report.collect import VariantRuns, collect, differing, flat
from excite.report.margin_history import margin_history
from excite.report.panels import WHOLE
from excite.report.verdict import Headline, verdict
from excite.report.verdict.contents import first_line, to_json
from excite.report.verdict.runs import overviews, split_diverged
from excite.report.view import RunView, describe, draw, findings, run_findings
from excite.runs.reader import MetricsReader

STYLES = ("uplot.css", "page.css")
SCRIPTS = ("uplot.js", "labels.js", "charts.js", "view.js")  # of a page with charts, in this order
ASSETS = (*STYLES, *SCRIPTS, "list.js", "tasks.js")
FROZEN_POINTS, FROZEN_BUDGET = 500, 20_000  # points of a curve, and of all curves of one quantity, in a file


@dataclass(frozen=True)
class Report:
    """Runs grouped by variant, the summary table and the verdict.

    Attributes:
        variants: The runs of each variant.
        rows: Rows of the summary table, by column.
        sentences: The verdict, sentence by sentence.

    Example:
        >>> with excite.watch(model, example=x, run="runs/first") as watch:
        ...     watch.step(0.7)
        >>> report = make_report(["runs/first"])
        >>> len(report.variants)
        1
    """

    variants: tuple[VariantRuns, ...]
    rows: tuple[dict[str, str], ...]  # one per variant: accuracy, median margins, gap
    sentences: tuple[str, ...]
    arms = renamed_attribute("arms", "variants")

    @cached_property
    def contents(self) -> dict[str, Any]:
        """The first line, the ranking of several runs and the settings that differ, as JSON."""
        worst = None
        if len(self.variants) == 1 and len(self.variants[0].runs) == 1:
            (run,) = self.variants[0].runs
            with closing(MetricsReader(run.path)) as metrics_reader:
                metrics_reader.refresh()
                worst = next(
                    iter(run_findings(RunView(metrics_reader, "", 0, order=tuple(run.layers()), roles=run.roles()))),
                    None,
                )
        line, outcomes = first_line(self.variants, overviews(self.variants), worst)
        return to_json(line, outcomes, self.variants)

    @property
    def headline(self) -> Headline:
        """The first line: how robust, whether training tells the truth about test, how sure, what to do next."""
        return Headline(**self.contents["verdict"])

    def write(self, target: str | os.PathLike[str], title: str | None = None) -> Path:
        """Writes the report as one self-contained HTML file.

        Args:
            target: File to write; missing folders are created.
            title: Title of the page; by default the name of the run, if it is one, and "Excite report".

        Returns:
            The path of the file.
        """
        path = Path(target)
        html = _render(self, title or _title(self))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, html.encode("utf-8", "replace"))  # JSON may hold half of a character
        return path


def make_report(paths: Iterable[str | Path], below: Path | None = None) -> Report:
    """Builds the report on one or more runs.

    Args:
        paths: Run folders, folders of runs, or URLs.
        below: For runs that others can write: see `excite.report.collect.collect`.

    Returns:
        The report; `write` makes an HTML file of it.

    Raises:
        InputError: If `paths` is not a list or holds no run.
        RunError: If a run folder is damaged.

    Example:
        >>> with excite.watch(model, example=x, run="runs/first") as watch:
        ...     watch.step(0.7)
        >>> make_report(["runs/first"]).write("report.html")
    """
    variants = collect(paths, below)
    sound, lost = split_diverged(variants, below)
    sentences = [*(verdict(sound) if sound or not lost else ()), *lost]
    return Report(tuple(variants), tuple(table(variants)), tuple(sentences))


def _title(report: Report) -> str:
    runs = [run for variant in report.variants for run in variant.runs]
    return f"{runs[0].path.name}: Excite report" if len(runs) == 1 else "Excite report"


def _render(report: Report, title: str) -> str:
    shown = [
        RunView(MetricsReader(run.path), variant.name, i, first=j == 0, order=tuple(run.layers()), roles=run.roles())
        for i, variant in enumerate(report.variants)
        for j, run in enumerate(variant.runs)
    ]
    try:
        for selected in shown:
            selected.metrics_reader.refresh()
        panels = describe(shown)
        if not all(selected.first for selected in shown):
            for panel in panels:
                if any(layer != WHOLE for quantity in panel["quantities"] for layer in quantity["layers"]):
                    panel["about"] += " Layers are those of the first run of each way of training."
        keys = {quantity["key"] for panel in panels for quantity in panel["quantities"]}
        runs = [{"label": selected.label, "group": selected.group} for selected in shown]
        named = [replace(selected, label=selected.metrics_reader.path.name) for selected in shown]
        data = draw(shown, keys, FROZEN_POINTS, budget=FROZEN_BUDGET)
        frozen = {
            "runs": runs,
            "panels": panels,
            "data": data,
            "findings": findings(named),
            "margins": margin_history(shown),
        }
    finally:
        for selected in shown:
            selected.metrics_reader.close()
    return render(
        "report.html.j2",
        title=title,
        styles=[asset(name) for name in STYLES],
        scripts=[asset(name) for name in SCRIPTS],
        frozen=frozen | report.contents | {"figures": _figures(report.variants)},
        count=len(shown),
        **report.contents,
        **_contents(report),
    )


def details(paths: Sequence[Path], below: Path | None = None) -> dict[str, Any]:
    """Verdict, tables and figures of whole runs for the live page: HTML from the templates of the report."""
    report = make_report(paths, below)
    contents = _contents(report)
    measured = any(run.margins for variant in report.variants for run in variant.runs)
    return {
        "top": render("summary.html.j2", **contents) if measured else "",
        "bottom": render("settings.html.j2", **contents),
        "figures": _figures(report.variants),
    }


def _contents(report: Report) -> dict[str, Any]:
    variants = report.variants
    return {
        "rows": report.rows,
        "sentences": report.sentences,
        "margins": any(run.margins for variant in variants for run in variant.runs),
        "judged": any(
            run.margins or run.accuracy for variant in variants for run in variant.runs
        ),  # by `excite margins` or a training
        "wiring": next((run.wiring for variant in variants for run in variant.runs if run.wiring), None),
        "all_settings": _settings(variants),
        "environment": flat(variants[0].runs[0].environment),
        "evidence": _evidence(variants),
    }


def _figures(variants: Sequence[VariantRuns]) -> dict[str, Any]:
    result = figures.margin_curves(variants)
    return {"margins": result} if result else {}


def render(template: str, **values: Any) -> str:
    """Renders a template to HTML; all values are escaped."""
    return _environment().get_template(template).render(version=__version__, **values)


def compile_templates(*templates: str) -> None:
    """Loads templates and what they include, so that the first page does not wait for it."""
    for name in templates:
        _environment().get_template(name)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("excite.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def asset(name: str) -> str:
    """Text of a script or style sheet; all of them are part of the installation."""
    return (files("excite.report") / "static" / name).read_text(encoding="utf-8")


def table(variants: Sequence[VariantRuns]) -> list[dict[str, str]]:
    """One row per variant: accuracy, median margins, gap and censored points; means over runs, with the range if several."""
    rows = []
    for variant in variants:
        row = {"arm": variant.name, "runs": str(len(variant.runs))}
        for split in ("train", "test"):
            values = variant.values(split)
            row[f"accuracy {split}"] = _mean(variant.accuracies(split), "{:.1%}")
            row[f"margin {split}"] = "–" if values is None else _number(float(np.median(values)))
            row[f"censored {split}"] = "–" if values is None else f"{np.isinf(values).mean():.1%}"
        gap = variant.gap()
        row["gap"] = "–" if gap is None else f"{gap:.3f}"
        rows.append(row)
    return rows


def _mean(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    text = form.format(float(np.mean(values)))
    return text if len(values) == 1 else f"{text} ({form.format(min(values))} to {form.format(max(values))})"


def _number(value: float) -> str:
    return f"{value:.4f}" if np.isfinite(value) else "not reached"


def _settings(variants: Sequence[VariantRuns]) -> dict[str, Any]:
    """Settings of the first run of each variant; those that differ between variants come first."""
    columns = [variant.runs[0].settings() for variant in variants]
    different = differing(columns)
    names = list(dict.fromkeys(name for column in columns for name in column))
    names.sort(key=lambda name: name not in different)
    return {
        "variants": [variant.name for variant in variants],
        "rows": [(name, name in different, [column.get(name, "–") for column in columns]) for name in names],
    }


def _evidence(variants: Sequence[VariantRuns]) -> list[tuple[str, str, str]]:
    return [
        (run.path.name, split, str(margins))
        for variant in variants
        for run in variant.runs
        for split, margins in run.margins.items()
    ]
