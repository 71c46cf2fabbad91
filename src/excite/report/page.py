"""One self-contained HTML file: everything inside, nothing fetched, opens from disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from excite._core.files import write_bytes, writing
from excite._version import __version__
from excite.report import figures
from excite.report.collect import Arm, collect, differing, flat
from excite.report.panels import WHOLE
from excite.report.verdict import verdict
from excite.report.view import Shown, describe, draw, findings
from excite.runs.reader import Follower

ASSETS = ("plotly.js", "page.css", "view.js", "list.js", "tasks.js")
FROZEN_POINTS, FROZEN_BUDGET = 500, 20_000  # points of a curve, and of all curves of one quantity, in a file


@dataclass(frozen=True)
class Report:
    """Runs, grouped into arms, and what they show."""

    arms: tuple[Arm, ...]
    rows: tuple[dict[str, str], ...]  # one an arm: accuracy, median margins, gap
    sentences: tuple[str, ...]

    def write(self, target: str | os.PathLike[str], title: str = "Excite report") -> Path:
        """Write one self-contained HTML file to `target`; returns its path."""
        path = Path(target)
        html = _render(self, title)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, html.encode("utf-8", "replace"))  # JSON may hold half of a character
        return path


def make_report(paths: Iterable[str | Path], below: Path | None = None) -> Report:
    """The report on the runs at `paths`, or in folders of runs; `below`: see `collect`."""
    arms = collect(paths, below)
    return Report(tuple(arms), tuple(table(arms)), tuple(verdict(arms)))


def _render(report: Report, title: str) -> str:
    shown = [
        Shown(Follower(run.path), arm.name, i, first=j == 0, order=tuple(run.layers()))
        for i, arm in enumerate(report.arms)
        for j, run in enumerate(arm.runs)
    ]
    try:
        for one in shown:
            one.follower.refresh()
        panels = describe(shown)
        if not all(one.first for one in shown):
            for panel in panels:
                if any(layer != WHOLE for quantity in panel["quantities"] for layer in quantity["layers"]):
                    panel["about"] += " Layers are those of the first run of each way of training."
        keys = {quantity["key"] for panel in panels for quantity in panel["quantities"]}
        runs = [{"label": one.label, "group": one.group} for one in shown]
        named = [replace(one, label=one.follower.path.name) for one in shown]
        data = draw(shown, keys, FROZEN_POINTS, budget=FROZEN_BUDGET)
        frozen = {"runs": runs, "panels": panels, "data": data, "findings": findings(named)}
    finally:
        for one in shown:
            one.follower.close()
    return render(
        "report.html.j2",
        title=title,
        styles=asset("page.css"),
        plotly=asset("plotly.js"),
        script=asset("view.js"),
        frozen=frozen | {"figures": _figures(report.arms)},
        count=len(shown),
        **_contents(report),
    )


def details(paths: Sequence[Path], below: Path | None = None) -> dict[str, Any]:
    """For the live page: what is said and drawn about whole runs, as HTML from the templates of the report."""
    report = make_report(paths, below)
    contents = _contents(report)
    top = render("summary.html.j2", **contents) if any(run.margins for arm in report.arms for run in arm.runs) else ""
    return {"top": top, "bottom": render("settings.html.j2", **contents), "figures": _figures(report.arms)}


def _contents(report: Report) -> dict[str, Any]:
    arms = report.arms
    return {
        "rows": report.rows,
        "sentences": report.sentences,
        "margins": any(run.margins for arm in arms for run in arm.runs),
        "judged": any(
            run.margins or run.accuracy for arm in arms for run in arm.runs
        ),  # by `excite margins` or a training
        "wiring": next((run.wiring for arm in arms for run in arm.runs if run.wiring), None),
        "settings": _settings(arms),
        "environment": flat(arms[0].runs[0].environment),
        "evidence": _evidence(arms),
    }


def _figures(arms: Sequence[Arm]) -> dict[str, Any]:
    found = figures.margin_curves(arms)
    return {} if found is None else {"margins": json.loads(str(found.to_json()))}


def render(template: str, **values: Any) -> str:
    """A page or a part of one; everything put into it is escaped."""
    return _environment().get_template(template).render(version=__version__, **values)


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
    """A script or style sheet of the pages; all of them are part of the installation, nothing is fetched."""
    if name == "plotly.js":
        return unwrapped(str(get_plotlyjs()))
    return (files("excite.report") / "static" / name).read_text(encoding="utf-8")


def unwrapped(plotly: str) -> str:
    """Plotly's script so that a browser starts it in about half the time.

    A function handed to another one, as its wrapper does, is read twice: once to find its end, once to run it. And while it
    starts it asks whether `eval` is allowed; the pages forbid it, and for the trace of that error five megabytes would be read
    three times more. A script that looks different is left as it is.
    """
    start, end = plotly.find('"use strict";var Plotly=(()=>{'), plotly.rfind("\nwindow.Plotly = Plotly;")
    if not 0 <= start < end:
        return plotly
    license = plotly[: plotly.find("*/") + 2]
    body = plotly[start + len('"use strict";') : end]
    return f'{license}\n"use strict";Error.stackTraceLimit=0;{body}\nError.stackTraceLimit=10;\n'


def table(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """One row an arm: accuracy, median margins, gap and censored points; means over runs, with the range if several."""
    rows = []
    for arm in arms:
        row = {"arm": arm.name, "runs": str(len(arm.runs))}
        for part in ("train", "test"):
            values = arm.values(part)
            row[f"accuracy {part}"] = _mean(arm.accuracies(part), "{:.1%}")
            row[f"margin {part}"] = "–" if values is None else _number(float(np.median(values)))
            row[f"censored {part}"] = "–" if values is None else f"{np.isinf(values).mean():.1%}"
        gap = arm.gap()
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


def _settings(arms: Sequence[Arm]) -> dict[str, Any]:
    """Settings of the first run of each arm; those that differ between arms come first."""
    columns = [dict(flat(arm.runs[0].config)) for arm in arms]
    different = differing(columns)
    names = list(dict.fromkeys(name for column in columns for name in column))
    names.sort(key=lambda name: name not in different)
    return {
        "arms": [arm.name for arm in arms],
        "rows": [(name, name in different, [column.get(name, "–") for column in columns]) for name in names],
    }


def _evidence(arms: Sequence[Arm]) -> list[tuple[str, str, str]]:
    return [
        (run.path.name, part, str(margins)) for arm in arms for run in arm.runs for part, margins in run.margins.items()
    ]
