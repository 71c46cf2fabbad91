"""One self-contained HTML file: everything inside, nothing fetched, opens from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from excite._version import __version__
from excite.report import figures
from excite.report.collect import Arm, collect, differing, flat
from excite.report.verdict import verdict
from excite.runs.files import write_bytes, writing


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
        write_bytes(path, html.encode())
        return path


def make_report(paths: Iterable[str | Path]) -> Report:
    """The report on the runs at `paths`, or in folders of runs."""
    arms = collect(paths)
    return Report(tuple(arms), tuple(table(arms)), tuple(verdict(arms)))


def _render(report: Report, title: str) -> str:
    arms = report.arms
    environment = Environment(
        loader=PackageLoader("excite.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=title,
        version=__version__,
        plotly=get_plotlyjs(),
        rows=report.rows,
        sentences=report.sentences,
        charts={
            "margins": _div(figures.margin_curves(arms), "margins"),
            "ranks": _div(figures.ranks(arms), "ranks"),
            "losses": _div(figures.losses(arms), "losses"),
            "distances": _div(figures.distances(arms), "distances"),
        },
        wiring=next((run.wiring for arm in arms for run in arm.runs if run.wiring), None),
        settings=_settings(arms),
        environment=flat(arms[0].runs[0].environment),
        evidence=_evidence(arms),
        count=sum(len(arm.runs) for arm in arms),
    )


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


def _div(figure: go.Figure | None, name: str) -> str | None:
    if figure is None:
        return None
    config = {"displaylogo": False, "responsive": True}
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"chart-{name}", config=config)
    return text
