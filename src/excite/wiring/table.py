"""A wiring as text that fits a terminal of 100 columns, and as plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from excite.wiring.cuts import Cut
from excite.wiring.groups import Group, Site, names
from excite.wiring.layers import Layer

WIDTH = 100


def layer_rows(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """One dict per layer."""
    return [
        {
            "name": layer.name,
            "kind": layer.kind,
            "in": shape_text(layer.in_shape),
            "out": shape_text(layer.out_shape),
            "parameters": layer.parameters,
            "role": layer.role,
        }
        for layer in layers
    ]


def group_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One dict per group."""
    return [
        {
            "producers": list(names(group.producers)),
            "consumers": list(names(group.consumers)),
            "channels": group.channels,
            "width": group.width,
            "law": group.law,
            "why": group.why,
            "role": group.role,
        }
        for group in groups
    ]


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as text, 3×32×32."""
    return "×".join(map(str, shape)) if shape else "1"


def render(layers: Sequence[Layer], groups: Sequence[Group], cuts: Sequence[Cut], notes: Sequence[str]) -> str:
    """The whole wiring as text."""
    sections = [_layers_table(layers)]
    if groups:
        sections.append(_groups_table(groups))
    if any(len(cut.groups) > 1 for cut in cuts):
        sections.append(_cuts_table(cuts))
    sections += [textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="      ") for note in notes]
    return "\n\n".join(sections)


def _layers_table(layers: Sequence[Layer]) -> str:
    rows = [[r["name"], r["kind"], r["in"], r["out"], f"{r['parameters']:,}", r["role"]] for r in layer_rows(layers)]
    header = ["layer", "kind", "in", "out", "parameters", "role"]
    if not any(layer.role for layer in layers):
        header, rows = header[:-1], [row[:-1] for row in rows]
    rows_of_text = _columns(header, rows, right={4})
    if max(map(len, rows_of_text)) > WIDTH and len(header) == 6:  # roles below, each on a line of its own
        short = _columns(header[:-1], [row[:-1] for row in rows], right={4})
        rows_of_text = short[:2]
        for line, row in zip(short[2:], rows):
            rows_of_text += [line, *([f"  {row[-1]}"] if row[-1] else [])]
    return "\n".join(rows_of_text)


def _columns(header: list[str], rows: list[list[str]], right: set[int]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "─" * min(WIDTH, max(map(len, lines))))
    return lines


def _groups_table(groups: Sequence[Group]) -> str:
    """One line per group if that fits; otherwise the reason goes below, and long lists of layers are wrapped."""
    header = ["channels", "law", "producers → consumers", "why"]
    rows = []
    for alike in _bunched(groups):
        group = alike[0]
        count = str(group.channels) if group.width == group.channels else f"{group.channels} of {group.width}"
        made, read = (_sites([[*getattr(group, side)] for group in alike]) for side in ("producers", "consumers"))
        rows.append(
            [f"{len(alike)}×{count}" if len(alike) > 1 else count, group.law, f"{made} → {read or '·'}", group.why]
        )
    lines = _columns(header, rows, right={0})
    if max(map(len, lines)) <= WIDTH:
        return "\n".join(lines)
    lines = _columns([*header[:2], f"{header[2]}  ({header[3]})"], [[*row[:2], ""] for row in rows], right={0})
    margin = lines[0].index(header[2])
    result = [lines[0], "─" * WIDTH]
    for line, row in zip(lines[2:], rows):
        text = textwrap.wrap(
            f"{row[2]}  ({row[3]})", WIDTH - margin - 2, break_long_words=False, break_on_hyphens=False
        )
        result.append(line.ljust(margin) + text[0])
        result += [" " * (margin + 2) + more for more in text[1:]]
    return "\n".join(result)


def _bunched(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that differ only in which channels of the same layers they are (the heads of attention) share a line."""
    bunches: dict[object, list[Group]] = {}
    for group in groups:
        sides = [tuple((site.parameter, site.side) for site in sites) for sites in (group.producers, group.consumers)]
        bunches.setdefault((*sides, group.law, group.why, group.channels, group.width), []).append(group)
    return list(bunches.values())


def _sites(alike: Sequence[Sequence[Site]], max_names: int = 12) -> str:
    """Names of layers with the channels they contribute, over groups with the same sites."""
    labels: dict[str, None] = {}
    for same in zip(*alike):
        numbers = sorted(number for site in same for numbers in site.index for number in numbers)
        times = "" if same[0].times == 1 else f"{same[0].times}·"
        labels.setdefault(times + same[0].layer + _span(numbers, same[0].of))
    shown = list(labels)
    if len(shown) > max_names:
        shown = [*shown[: max_names - 1], f"{len(shown) - max_names + 1} more"]
    return ", ".join(shown)


def _span(numbers: list[int], total: int) -> str:
    """Which channels of the layer, if not all: [16:20], or how many of how many."""
    if len(numbers) == total:
        return ""
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"[{numbers[0]}:{numbers[-1] + 1}]"
    return f"[{len(numbers)} of {total}]"


def _cuts_table(cuts: Sequence[Cut]) -> str:
    """Cuts behind which lie several groups; of one group, a cut is the sum over its line above."""
    lines = ["layer against layer: squares of all weights that enter − of all that leave", "─" * WIDTH]
    for cut in cuts:
        if len(cut.groups) > 1:
            text = f"{_whole_layers(cut.enters)}  −  {_whole_layers(cut.leaves)}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _whole_layers(paths: Sequence[str], max_names: int = 12) -> str:
    """Weights under the name of their layer, as in the other tables; biases that enter without their weight in full."""
    shown: dict[str, None] = {}
    for path in paths:
        name = path.replace(".weight", "")
        if not (path.endswith(".bias") and path.removesuffix("bias") + "weight" in paths):
            shown.setdefault(name)
    names = list(shown)
    return ", ".join(
        [*names[: max_names - 1], f"{len(names) - max_names + 1} more"] if len(names) > max_names else names
    )
