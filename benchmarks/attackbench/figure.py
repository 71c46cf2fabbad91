"""The figure of the benchmark: what each attack leaves of the distance above the smallest found, against its passes and seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.attackbench.attacks import NORMS
from benchmarks.attackbench.attacks import WORDS as ATTACKS
from benchmarks.attackbench.tables import OURS, Row

_HEADING = re.compile(r"### Attackbench, (\w+), norm (\w+)")
_GAP = 0.13  # least distance of labels, in powers of ten
_COLORS = {OURS: "#c1121f", "apgd_t": "#1f4e79"}


def rows_of_page(path: Path) -> list[Row]:
    """The rows of the tables that `table` printed into a page."""
    names, rows, heading = {words: name for name, words in ATTACKS.items()}, [], None
    images = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = _HEADING.match(line)
        elif heading and (count := re.search(r"; (\d+) test images", line)):
            images = int(count[1])
        elif heading and line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells[0] in names:
                forwards, backwards = (float(number) for number in cells[3].split("+"))
                rows.append(
                    Row(heading[1], heading[2], names[cells[0]], images, float(cells[1]),
                        float(cells[2].rstrip("%")) / 100, forwards, backwards, float(cells[4]), None)
                )  # fmt: skip
    return rows


@dataclass(frozen=True)
class _Point:
    """One attack in one panel: means over the networks, and the smallest and largest of them."""

    attack: str
    x: float
    y: float
    ends: tuple[float, float]


def _points(rows: list[Row], norm: str, attribute: str) -> Iterator[_Point]:
    for name in ATTACKS:
        chosen = [row for row in rows if (row.attack, row.norm) == (name, norm)]
        if chosen:
            missing = [100 * max(1 - row.optimality, 1e-5) for row in chosen]
            x = float(np.mean([getattr(row, attribute) for row in chosen]))
            yield _Point(name, x, float(np.mean(missing)), (min(missing), max(missing)))


def _labels(points: list[_Point]) -> Iterator[tuple[_Point, float, bool]]:
    """Each point with the height of its label, pushed apart, and whether the label is left of it."""
    last = {True: -math.inf, False: -math.inf}
    for point in sorted(points, key=lambda p: p.y):
        beside = (p for p in points if 1.05 < p.x / point.x < 4 and 0.77 < p.y / point.y < 1.3)
        left = any(True for _ in beside)
        last[left] = max(math.log10(point.y), last[left] + _GAP)
        yield point, 10 ** last[left], left


def draw(rows: list[Row], path: Path) -> None:
    """Means over the networks that are not masked; lines reach from the best to the worst of them. Lower left is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    honest = [row for row in rows if row.kind != "masked"]
    norms = [norm for norm in NORMS if any(row.norm == norm for row in honest)]
    figure, axes = plt.subplots(
        2,
        len(norms),
        figsize=(1 + 4.4 * len(norms), 7.4),
        sharex="row",
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for column, norm in enumerate(norms):
        for ax, attribute in zip(axes[:, column], ("passes", "seconds")):
            points = list(_points(honest, norm, attribute))
            for point, height, left in _labels(points):
                ours, color = point.attack == OURS, _COLORS.get(point.attack, "#777777")
                ax.plot([point.x] * 2, point.ends, color=color, linewidth=2.5 if ours else 1.2)
                ax.plot(point.x, point.y, "o", color=color, markersize=13 if ours else 7)
                ax.annotate(re.split(r",| \(", ATTACKS[point.attack])[0], (point.x, height), (-9 if left else 9, 0), textcoords="offset points",
                            va="center", ha="right" if left else "left", color=color, fontsize=12 if ours else 9,
                            fontweight="bold" if ours else "normal")  # fmt: skip
            ax.set(xscale="log", yscale="log")
            ax.set_xlabel("passes per image" if attribute == "passes" else "seconds for all images")
            ax.grid(alpha=0.2)
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_formatter(NullFormatter())
            ax.text(0.97, 0.04, "↙ lower left is better", transform=ax.transAxes, ha="right", color="#555555")
        axes[0, column].set_title({"inf": "norm ∞", "2": "norm 2", "1": "norm 1"}[norm])
    for ax, attribute in zip(axes[:, 0], ("passes", "seconds")):
        positions = [point.x for norm in norms for point in _points(honest, norm, attribute)]
        ax.set_xlim(min(positions) / 1.6, max(positions) * 5)  # space for labels
        ax.set_ylabel("above the smallest margins found\n(1 − optimality)")
    figure.savefig(path, dpi=120)
