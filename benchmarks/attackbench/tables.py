"""Tables and figure of the cells that are stored: quality against passes and seconds, verdicts computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.attackbench.attacks import NORMS, contenders
from benchmarks.attackbench.attacks import WORDS as ATTACKS
from benchmarks.attackbench.cells import Cell, cell_path
from benchmarks.attackbench.networks import KINDS
from benchmarks.attackbench.networks import WORDS as NETWORKS
from benchmarks.attackbench.quality import envelope, near, optimality, paired_difference

AIMS = {"inf": 0.99, "2": 0.985, "1": 0.98}
NEAR_AIM = 0.98
OURS = "excite"


@dataclass(frozen=True)
class Row:
    """One attack on one network in one norm, on the images that all attacks there had."""

    kind: str
    norm: str
    attack: str
    images: int
    optimality: float
    near: float
    forwards: float
    backwards: float
    seconds: float
    difference: tuple[float, float, float] | None  # optimality of ours minus its own, and the interval

    @property
    def passes(self) -> float:
        return self.forwards + self.backwards


def read_cells(folder: Path, kind: str, norm: str) -> dict[str, Cell]:
    """The cells of one network and norm that are there, by name of the attack."""
    paths = {c.name: cell_path(folder, kind, norm, c.name) for c in contenders()}
    return {name: Cell.read(path) for name, path in paths.items() if path.exists()}


def rows_of(folder: Path, kind: str, norm: str) -> list[Row]:
    """One row per attack; all are compared on the images of the attack with the fewest."""
    cells = read_cells(folder, kind, norm)
    if len(cells) < 2:
        return []
    count = min(len(cell.distances) for cell in cells.values())
    distances = {name: cell.distances[:count] for name, cell in cells.items()}
    best = envelope(distances)
    rows = []
    for name, cell in cells.items():
        versus = OURS in distances and name != OURS
        difference = paired_difference(distances[OURS], distances[name], best) if versus else None
        # seconds of a cell are for all of its images; in proportion for those compared
        seconds = cell.seconds * count / len(cell.distances)
        rows.append(
            Row(kind, norm, name, count, optimality(distances[name], best), near(distances[name], best),
                cell.forwards, cell.backwards, seconds, difference)
        )  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    """One network and norm in Markdown."""
    lines = [
        "| attack | optimality | within 1 % of the best | passes forward + backward | seconds | optimality of ours minus this (95 %) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        versus = "" if row.difference is None else "{:+.4f} ({:+.4f} to {:+.4f})".format(*row.difference)
        lines.append(
            f"| {ATTACKS[row.attack]} | {row.optimality:.4f} | {row.near:.1%} | {row.forwards:.0f} + {row.backwards:.0f} | "
            f"{row.seconds:.1f} | {versus} |"
        )
    return "\n".join(lines)


def verdicts(rows: list[Row]) -> list[str]:
    """What was aimed at, and whether it was met, for our row among those of one network and norm."""
    by_name = {row.attack: row for row in rows}
    if OURS not in by_name:
        return []
    ours, kind, norm = by_name[OURS], rows[0].kind, rows[0].norm
    ahead = [ATTACKS[r.attack] for r in rows if r.difference is not None and r.difference[2] < 0]
    parts = [
        _verdict(f"optimality {ours.optimality:.4f} (aim {AIMS[norm]})", ours.optimality >= AIMS[norm]),
        _verdict(f"within 1 % at {ours.near:.1%} (aim {NEAR_AIM:.0%})", ours.near >= NEAR_AIM),
        _verdict(f"behind {', '.join(ahead)}" if ahead else "behind none (paired bootstrap)", not ahead),
    ]
    if "apgd_t" in by_name and kind != "masked":
        share = ours.passes / by_name["apgd_t"].passes
        parts.append(_verdict(f"{share:.2f} of APGD_t's passes (aim 0.2)", share <= 0.2))
    return parts


def _verdict(what: str, met: bool) -> str:
    return f"{'met' if met else '**missed**'}: {what}"


def show(folder: Path, figure: Path | None = None) -> None:
    """Prints all tables and verdicts, and draws the figure if a file is given."""
    everything: list[Row] = []
    for kind in KINDS:
        for norm in NORMS:
            rows = rows_of(folder, kind, norm)
            if not rows:
                continue
            everything += rows
            device = Cell.read(cell_path(folder, kind, norm, rows[0].attack)).device
            print(f"### Attackbench, {kind}, norm {norm}\n\n{NETWORKS[kind]}; {rows[0].images} test images; {device}\n")
            print(f"{table(rows)}\n\n" + "\n".join(f"- {line}" for line in verdicts(rows)) + "\n")
    print(totals(everything))
    (folder / "rows.json").write_text(json.dumps([vars(row) for row in everything], indent=1))
    if figure is not None:
        draw(everything, figure)


def totals(rows: list[Row]) -> str:
    """Means over the networks that are not masked, by norm and attack."""
    lines = ["### Attackbench, means over the three networks without masked gradients", "", "| attack | " + " | ".join(f"{n}: optimality | within 1 % | passes | seconds" for n in NORMS) + " |",
             "|---|" + "--:|" * 4 * len(NORMS)]  # fmt: skip
    for name, words in ATTACKS.items():
        parts = []
        for norm in NORMS:
            chosen = [r for r in rows if (r.attack, r.norm) == (name, norm) and r.kind != "masked"]
            if len(chosen) == len(KINDS) - 1:
                mean = [np.mean([getattr(r, a) for r in chosen]) for a in ("optimality", "near", "passes", "seconds")]
                parts.append("{:.4f} | {:.1%} | {:.0f} | {:.1f}".format(*mean))
            else:
                parts.append(" | | | ")
        if any(part.strip(" |") for part in parts):
            lines.append(f"| {words} | " + " | ".join(parts) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Optimality against passes per image (above) and seconds (below), one column per norm: up and left is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    honest = [r for r in rows if r.kind != "masked"]
    names = [name for name in ATTACKS if any(r.attack == name for r in honest)]
    norms = [norm for norm in NORMS if any(r.norm == norm for r in honest)]
    figure, axes = plt.subplots(
        2, len(norms), figsize=(1.5 + 3.2 * len(norms), 6.4), sharey="col", layout="constrained", squeeze=False
    )
    others = iter(("C0", "C1", "C2", "C4", "C5", "C6", "C8", "C9"))  # no red, which is ours, and no grey
    colors = {name: "#c1121f" if name == OURS else next(others) for name in names}
    marks = {"plain": "o", "pgd": "s", "excited": "^"}
    for column, norm in enumerate(norms):
        chosen = [r for r in honest if r.norm == norm]
        for line, attribute in enumerate(("passes", "seconds")):
            ax = axes[line, column]
            for row in chosen:
                ours = row.attack == OURS
                ax.plot(getattr(row, attribute), max(1 - row.optimality, 1e-4), marks[row.kind], color=colors[row.attack],
                        markersize=10 if ours else 6, markeredgecolor="black" if ours else "none", alpha=1 if ours else 0.75)  # fmt: skip
            ax.set(
                xscale="log",
                yscale="log",
                xlabel="passes per image" if attribute == "passes" else "seconds for the images",
            )
            ax.grid(alpha=0.25)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_formatter(NullFormatter())
        axes[0, column].set_title({"inf": "ℓ∞", "2": "ℓ2", "1": "ℓ1"}[norm])
        axes[0, column].invert_yaxis()
    for ax in axes[:, 0]:
        ax.set_ylabel("1 − optimality (up is better)")
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=colors[n], label=ATTACKS[n]) for n in names]
    handles += [
        plt.Line2D([], [], marker=m, linestyle="", color="grey", label=f"{k} network") for k, m in marks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
