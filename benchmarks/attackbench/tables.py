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
        from benchmarks.attackbench.figure import draw

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
