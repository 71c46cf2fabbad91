"""Which measured quantities belong together on a page, in which order, and what they mean in a sentence.

A metric is called `probe/quantity/layer` or `probe/quantity`. A panel is a probe: its quantities are the choices of one
menu, its layers those of another. Built-in probes describe their panel themselves (`Probe.panel`);
other probes get a panel with their own name, after these. Names without a slash come from `watch.log` and share a panel.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from excite.probes import MarginGap, built_in_probes
from excite.probes.findings import Panel
from excite.probes.margin_gap import PARTS

ALERT = "alert"  # first part of the names of alerts, which pages show as sentences
WHOLE = ""  # the "layer" of a value for the whole network


def _built_in_panels() -> tuple[Panel, ...]:
    """One panel per id, with the labels, hidden quantities and names of all probes that share it."""
    panels: dict[str, Panel] = {}
    for probe in built_in_probes():
        if (own := probe.panel) is None:
            continue
        panel = panels.get(own.id, replace(own, labels=(), probes=()))
        labels, probes = (*panel.labels, *own.labels), (*panel.probes, probe.name, *own.probes)
        panels[own.id] = replace(panel, labels=labels, probes=probes)
    return tuple(sorted(panels.values(), key=lambda panel: panel.order))


LOGGED = Panel(
    "logged", "Logged by the training", "Values that the training recorded with watch.log, or its framework."
)
RADIUS = Panel(
    "radius",
    "Radius of the excitation",
    "With radius 'auto' the factor of all radii grows while its cost in accuracy is below what is allowed, and shrinks above; "
    "the hidden radius of adversarial training grows also only while the gap of robust accuracies is above its target.",
    labels=(
        ("factor", "factor"),
        ("hidden_radius", "hidden radius"),
        ("cost", "cost in accuracy"),
        ("allowed", "allowed cost"),
        ("gap", "gap of robust accuracies"),
        ("need", "excess of the gap over its target"),
        ("headroom", "headroom below the allowed cost"),
    ),
    probes=("excitation",),
    docs="excitation.md#choosing-the-radius",
)
PANELS = (*_built_in_panels(), RADIUS, LOGGED)
_BY_PROBE = {name: panel for panel in PANELS for name in panel.probes}
_HIDDEN = {f"{probe.name}/{key}" for probe in built_in_probes() if probe.panel for key in probe.panel.hidden}
_MAX_OTHERS = 100  # panels of probes that are not known here, where not everything can be shown


@dataclass(frozen=True)
class Quantity:
    """One choice of a panel: all metrics `key` and `key/layer`."""

    key: str
    name: str
    layers: tuple[str, ...]  # WHOLE first, if there is one

    def metric(self, layer: str) -> str:
        """Name of the metric for a layer."""
        return f"{self.key}/{layer}" if layer != WHOLE else self.key


@dataclass(frozen=True)
class PanelView:
    """A panel with the quantities of some runs."""

    panel: Panel
    quantities: tuple[Quantity, ...]


def split(name: str) -> tuple[str, str, str]:
    """(probe, quantity, layer) of a metric's name; missing ones are empty."""
    probe, _, quantity_and_layer = name.partition("/")
    quantity, _, layer = quantity_and_layer.partition("/")
    return probe, quantity, layer


def _panel_of(probe: str, quantity: str) -> Panel:
    if known := _BY_PROBE.get(probe):
        return known
    return Panel(f"other-{probe}", probe, probes=(probe,)) if quantity else LOGGED


def panel_of(key: str) -> tuple[str, str]:
    """Id of the panel that draws a quantity "probe/quantity", and the quantity's label."""
    probe, quantity, _ = split(key)
    panel = _panel_of(probe, quantity)
    return panel.id, dict(panel.labels).get(quantity, key)


def anchor(panel: str) -> str:
    """Where a page draws a panel, as a link; margins of training and test data are the first chart."""
    return "#margin-history" if panel == MarginGap.name else f"#panel-{panel}"


def make_panels(names: Iterable[str], order: Sequence[str] = ()) -> list[PanelView]:
    """The panels for these metrics; `order` are the layers in the order of execution, as far as it is known."""
    result: dict[str, dict[str, set[str]]] = {}
    chosen: dict[str, Panel] = {}
    for name in names:
        probe, quantity, layer = split(name)
        key = f"{probe}/{quantity}" if quantity else probe
        if key in _HIDDEN or probe == ALERT:
            continue
        panel = _panel_of(probe, quantity)
        chosen[panel.id] = panel
        result.setdefault(panel.id, {}).setdefault(key, set()).add(layer)
    known = {panel.id: i for i, panel in enumerate(PANELS)}
    ids = sorted(chosen, key=lambda i: (known.get(i, len(known)), natural(i)))
    return [_panel(chosen[i], result[i], order) for i in ids]


def select(names: Iterable[str], limit: int, order: Sequence[str] = (), contains: str = "") -> tuple[set[str], int]:
    """At most `limit` of the metrics whose name contains `contains`, and how many are left out.

    Panels that Excite knows come first, then at most 100 others. Every quantity gets an equal part of what its probe may
    show; the whole network and layers that are executed early come first. Metrics that no panel draws count for nothing.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        probe, quantity, _ = split(name)
        key = f"{probe}/{quantity}" if quantity else probe
        if key not in _HIDDEN and probe != ALERT and contains in name:
            groups.setdefault(key, []).append(name)
    total = sum(map(len, groups.values()))
    if total <= limit and len(groups) <= _MAX_OTHERS:
        return {name for group in groups.values() for name in group}, 0
    places = {layer: i for i, layer in enumerate(order)}

    def execution_order(name: str) -> tuple[bool, int, int, str]:
        layer = split(name)[2]
        at = places.get(layer, places.get(layer.partition("/")[0], len(places)))  # a head is where its layer is
        return layer != WHOLE, at, len(layer), layer  # layer2 before layer10

    def probe_of(key: str) -> str:
        probe, quantity, _ = split(key)
        return probe if quantity or probe in _BY_PROBE else WHOLE  # logged values are one panel

    def foreign(key: str) -> tuple[bool, int, str]:
        probe = probe_of(key)
        return probe not in _BY_PROBE, len(probe), probe

    others = list(dict.fromkeys(probe_of(key) for key in sorted(groups, key=foreign) if foreign(key)[0]))
    shown = {*_BY_PROBE, *others[:_MAX_OTHERS]}
    keys = sorted((key for key in groups if probe_of(key) in shown), key=lambda key: (foreign(key)[0], len(key), key))
    chosen: set[str] = set()
    for i, key in enumerate(sorted(keys[:limit], key=lambda key: len(groups[key]))):  # small ones leave more for others
        fraction = (limit - len(chosen)) // (min(len(keys), limit) - i)
        group = groups[key]
        chosen.update(group if len(group) <= fraction else heapq.nsmallest(fraction, group, execution_order))
    return chosen, total - len(chosen)


def _panel(panel: Panel, keys: dict[str, set[str]], order: Sequence[str]) -> PanelView:
    labels = dict(panel.labels)
    wanted = list(labels)
    counts = Counter(split(key)[1] for key in keys)

    def sort_key(key: str) -> tuple[int, int, list[tuple[int, str]]]:
        probe, quantity, _ = split(key)
        return (
            wanted.index(quantity) if quantity in wanted else len(wanted) + (key == "epoch"),  # what a menu shows last
            panel.probes.index(probe) if probe in panel.probes else 0,
            natural(key),
        )

    quantities = []
    for key in sorted(keys, key=sort_key):
        probe, quantity, _ = split(key)
        name = labels.get(quantity, quantity or probe)
        # Two probes of one panel may call different things the same.
        twice = quantity != "" and counts[quantity] > 1
        quantities.append(Quantity(key, f"{name} ({probe})" if twice else name, in_order(keys[key], order)))
    return PanelView(panel, tuple(quantities))


def in_order(layers: Iterable[str], order: Sequence[str] = ()) -> tuple[str, ...]:
    """The whole network first, then layers as they are executed, then the others by name; training before test data."""
    result = list(layers)
    if set(result) <= {WHOLE, *PARTS}:
        order = PARTS
    places = {name: i for i, name in enumerate(order)}

    def sort_key(panel: str) -> tuple[bool, int, list[tuple[int, str]]]:
        at = places.get(panel, places.get(panel.partition("/")[0], len(places)))  # a head is where its layer is
        return panel != WHOLE, at, natural(panel)

    return tuple(sorted(result, key=sort_key))


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts layer2 before layer10."""
    return [
        (int(piece), "") if piece[0] in "0123456789" else (-1, piece) for piece in re.findall(r"[0-9]+|[^0-9]+", text)
    ]
