"""Draws the storeys of the package from its import graph: `make architecture` writes docs/images/architecture.svg.

Storeys are those of the import-linter contract in pyproject.toml. An arrow from A to B says that A imports B; arrows that
follow from others are left out (transitive reduction), and so are those to the two lowest storeys. Imports for type checking only are not counted.
"""

from __future__ import annotations

import html
import sys
import tomllib
from pathlib import Path

import grimp
import networkx as nx
import numpy as np
from scipy.optimize import isotonic_regression

ROOT = Path(__file__).parent.parent
DRAWING = ROOT / "docs/images/architecture.svg"
HIDDEN = {"__main__", "_version"}  # the entry point and one line of text
GROUND = 2  # the lowest storeys, which every package may import: drawn without arrows
BOX, HEIGHT, ROW, PAD = 120, 32, 62, 14


def imports(package: str = "excite") -> nx.DiGraph:
    """The packages directly below `package`, with an edge from each to those it imports."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    edges = nx.DiGraph()
    for module in graph.modules - {package}:
        importer = module.split(".")[1]
        edges.add_node(importer)
        for imported in graph.find_modules_directly_imported_by(module) - {package}:
            if imported.split(".")[1] != importer:
                edges.add_edge(importer, imported.split(".")[1])
    return edges


def storeys(pyproject: Path = ROOT / "pyproject.toml") -> list[list[str]]:
    """The layers of the import-linter contract, highest first, without what is not drawn."""
    contracts = tomllib.loads(pyproject.read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = [[name.strip() for name in layer.split(":")] for layer in layers]
    return [names for layer in named if (names := [name for name in layer if name not in HIDDEN])]


def rows_of(storey: list[str], graph: nx.DiGraph) -> list[list[str]]:
    """Packages of one storey in rows, highest first, so that each imports only from rows below."""
    inside = graph.subgraph(storey)
    height: dict[str, int] = {}
    for name in reversed(list(nx.topological_sort(inside))):
        height[name] = 1 + max((height[imported] for imported in inside[name]), default=-1)
    return [[name for name in storey if height[name] == level] for level in range(max(height.values()), -1, -1)]


def with_bends(graph: nx.DiGraph, rows: list[list[str]]) -> tuple[nx.DiGraph, list[list[str]]]:
    """The graph with a bend "A>B@row" in every row that an arrow from A to B passes, so that it goes around the boxes."""
    level = {name: i for i, row in enumerate(rows) for name in row}
    bent, bent_rows = nx.DiGraph(), [list(row) for row in rows]
    bent.add_nodes_from(graph)
    for a, b in sorted(graph.edges):
        bends = [f"{a}>{b}@{i}" for i in range(level[a] + 1, level[b])]
        nx.add_path(bent, [a, *bends, b])
        for i, bend in enumerate(bends, level[a] + 1):
            bent_rows[i].append(bend)
    return bent, bent_rows


def positions(graph: nx.DiGraph, rows: list[list[str]]) -> dict[str, float]:
    """Horizontal centre of every box and bend: near the mean of its neighbours, at a distance from others in its row.

    Sweeps up and down. In a row the order is that of the means, and the centres are the closest ones in the least-squares
    sense that keep the distances: an isotonic regression.
    """
    centre = {name: float(i * BOX) for row in rows for i, name in enumerate(row)}
    for sweep in range(12):
        for row in rows if sweep % 2 else reversed(rows):
            wish = {name: np.mean([centre[near] for near in nx.all_neighbors(graph, name)] or [0.0]) for name in row}
            ordered = sorted(row, key=lambda name: (wish[name], name))
            half = np.array([BOX / 2 + PAD if "@" not in name else PAD for name in ordered])
            offsets = np.concatenate([[0.0], np.cumsum(half[1:] + half[:-1])])
            placed = isotonic_regression(np.array([wish[name] for name in ordered]) - offsets).x + offsets
            centre |= dict(zip(ordered, placed.tolist()))
    left = min(centre.values()) - BOX / 2 - 2 * PAD
    return {name: x - left for name, x in centre.items()}


def draw(graph: nx.DiGraph, layers: list[list[str]]) -> str:
    """The drawing as SVG: one band per storey, one box per package, one arrow per import that no other implies."""
    shown = graph.subgraph([name for layer in layers for name in layer])
    bands = [rows_of(layer, shown) for layer in layers]
    upper = shown.subgraph([name for layer in layers[:-GROUND] for name in layer])
    bent, rows = with_bends(nx.transitive_reduction(upper), [row for band in bands[:-GROUND] for row in band])
    centre = positions(bent, rows)
    width = max(centre.values()) + BOX / 2 + 2 * PAD
    for row in [row for band in bands[-GROUND:] for row in band]:
        centre |= {name: width * (i + 1) / (len(row) + 1) for i, name in enumerate(row)}
    top: dict[str, float] = {}
    shapes, y = [], float(PAD)
    for band in bands:
        shapes.append(f'<rect class="storey" x="0" y="{y:.0f}" width="{width:.0f}" height="{ROW * len(band)}" rx="6"/>')
        for i, row in enumerate(band):
            top |= dict.fromkeys(row, y + i * ROW + (ROW - HEIGHT) / 2)
        y += ROW * len(band) + PAD
    for row in rows:
        middle = next(top[name] for name in row if name in top) + HEIGHT / 2
        top |= {name: middle for name in row if name not in top}
    note = f'<text class="note" x="{width / 2:.0f}" y="{y + PAD:.0f}">every package may import _core and errors</text>'
    arrows = [_arrow(centre, top, a, b) for a, b in sorted(bent.edges)]
    boxes = [_box(name, centre[name], top[name]) for name in top if "@" not in name]
    head = _HEAD.format(width=round(width), height=round(y + 2 * PAD))
    return "\n".join([head, *shapes, *arrows, *boxes, note, "</svg>", ""])


def _arrow(centre: dict[str, float], top: dict[str, float], a: str, b: str) -> str:
    x, y = centre[a], top[a] + (HEIGHT if "@" not in a else 0)
    end, below = centre[b], top[b] - (5 if "@" not in b else 0)
    bend = (below - y) / 2
    head = ' marker-end="url(#head)"' if "@" not in b else ""
    return (
        f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {end:.0f} {below - bend:.0f} {end:.0f} {below:.0f}"{head}/>'
    )


def _box(name: str, x: float, y: float) -> str:
    return (
        f'<rect class="package" x="{x - BOX / 2:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + HEIGHT / 2 + 5:.0f}">{html.escape(name)}</text>'
    )


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="Packages of Excite, lowest at the bottom; an arrow leads to what a package imports">
<style>
  .storey {{ fill: #eef1f5 }} .package {{ fill: #fff; stroke: #37474f; stroke-width: 1.5 }}
  path {{ fill: none; stroke: #78909c; stroke-width: 1.5 }} marker path {{ fill: #78909c; stroke: none }}
  text {{ font: 15px ui-monospace, monospace; text-anchor: middle; fill: #1f2328 }} .note {{ font: 14px system-ui, sans-serif; fill: #596270 }}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>"""


if __name__ == "__main__":
    DRAWING.write_text(draw(imports(), storeys()))
    sys.stdout.write(f"{DRAWING.relative_to(ROOT)}\n")
