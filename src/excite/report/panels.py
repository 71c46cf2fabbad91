"""Which measured quantities belong together on a page, in which order, and what they mean in a sentence.

A metric is called `probe/quantity/layer` or `probe/quantity`. A panel is a probe: its quantities are the choices of one
menu, its layers those of another. Probes that are not known here get a panel with their own name, after the others.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WHOLE = ""  # the "layer" of a value for the whole network


@dataclass(frozen=True)
class Panel:
    """How the metrics of some probes are drawn. `labels` are the quantities shown first, with their labels."""

    id: str
    probes: tuple[str, ...]
    title: str
    about: str
    labels: tuple[tuple[str, str], ...] = ()
    log: bool = False
    heatmap: bool = False  # also as a heat map over layers and time


PANELS = (
    Panel(
        "losses", ("loss",), "Loss",
        "The loss handed in after each step, averaged over the last 2 % of steps; the faint line of a single run is every "
        "step, at its highest and lowest. Losses of different ways of training are not comparable: excited ones are "
        "worst-case errors and stay higher.",
        (("step", "loss"),), log=True,
    ),
    Panel(
        "margin", ("margin", "margins"), "Margin",
        "How far an input has to be changed before the decision changes, found by attack on a fixed small batch. Larger is "
        "more robust.",
        (
            ("median", "median margin"), ("low", "margin that a tenth of the points do not reach"),
            ("misclassified", "share misclassified"), ("censored", "share never broken"),
        ),
    ),
    Panel(
        "steepness", ("trajectory", "lipschitz"), "Steepness of the function",
        "How strongly the output answers to the input at the points being trained on. A function that keeps getting steeper "
        "while the loss stands still fits details, which costs margin.",
        (
            ("mean", "steepness at training points"), ("lipschitz", "local Lipschitz constant"),
            ("max", "steepest training point"), ("phi", "φ: steepest in the last half"),
            ("tau", "τ: none above φ since step"), ("lower", "lower bound"), ("upper", "upper bound"),
            ("clean", "steepness, one sample at a time"), ("total", "length of the path so far"),
            ("sigma", "norm of the first layer"),
        ),
    ),
    Panel(
        "distances", ("distance",), "Distance to initialization",
        "How far the weights have moved from where they started.",
        (("relative", "‖θ − θ₀‖ / ‖θ₀‖"), ("absolute", "‖θ − θ₀‖")),
    ),
    Panel(
        "ranks", ("rank",), "How many directions each layer's input uses",
        "Effective rank of what enters each affine layer (patches, for convolutions), over the layer's input width. Where "
        "it falls, the layer sees ever fewer directions, and its weights along the others are not excited: nothing in "
        "training bounds them. Measured on the example as in training, without dropout: batch normalization uses the "
        "statistics of the example, unless it is frozen.",
        (
            ("share", "effective rank / width"), ("effective", "effective rank"),
            ("participation", "participation ratio"), ("numerical", "numerical rank"),
            ("smallest", "smallest eigenvalue / largest"), ("deficient", "share of units not excited"),
        ),
        heatmap=True,
    ),
    Panel(
        "balance", ("conservation",), "Balance of the layers",
        "What gradient flow would conserve between layers (squared weights that make a channel minus those that read it). "
        "“Moved” is the change since the start, “unexplained” what step size, momentum and decay do not account for: it "
        "should stay near zero. “Not checked” are steps whose update could not be predicted: they say nothing about the law.",
        (
            ("drift", "moved since the start"), ("rest", "unexplained"),
            ("unchecked", "share of the steps that were not checked"),
        ),
    ),
    Panel(
        "alignment", ("alignment", "direction"), "Alignment",
        "How far neighbouring layers point the same way, and whether the weights still turn. Networks that learn by the "
        "same few directions align and lose rank.",
        (
            ("aligned", "alignment of neighbours (1: the same way)"), ("ratio", "share of a layer in its first direction"),
            ("stable_rank", "stable rank of the weights"), ("distance", "distance to rank one"),
            ("angle", "turned lately, radians"), ("total", "turned since the start, radians"), ("norm", "norm of the weights"),
        ),
    ),
    Panel(
        "signs", ("signs",), "Signs of the weights",
        "The share of weights whose sign changed lately. Once no sign changes, the network is in the stable sign regime that "
        "the theory of late training speaks about.",
        (("changed", "share that changed lately"), ("since", "steps since any changed"), ("stable", "stable (1) or not (0)")),
    ),
)  # fmt: skip
_BY_PROBE = {probe: panel for panel in PANELS for probe in panel.probes}
_MAX_OTHERS = 100  # panels of probes that are not known here, where not everything can be shown
_HIDDEN = {
    "trajectory/label",
    "conservation/label",
    "rank/unit",
    "rank/statistics",
    "consistency/statistics",
}  # not numbers to draw


@dataclass(frozen=True)
class Quantity:
    """One choice of a panel: all metrics `key` and `key/layer`."""

    key: str
    name: str
    layers: tuple[str, ...]  # WHOLE first, if there is one

    def metric(self, layer: str) -> str:
        return f"{self.key}/{layer}" if layer != WHOLE else self.key


@dataclass(frozen=True)
class PanelView:
    panel: Panel
    quantities: tuple[Quantity, ...]


def split(name: str) -> tuple[str, str, str]:
    """(probe, quantity, layer) of a metric's name; missing ones are empty."""
    probe, _, rest = name.partition("/")
    quantity, _, layer = rest.partition("/")
    return probe, quantity, layer


def make_panels(names: Iterable[str], order: Sequence[str] = ()) -> list[PanelView]:
    """The panels for these metrics; `order` are the layers in the order of execution, as far as it is known."""
    found: dict[str, dict[str, set[str]]] = {}
    chosen: dict[str, Panel] = {}
    for name in names:
        probe, quantity, layer = split(name)
        key = f"{probe}/{quantity}" if quantity else probe
        if key in _HIDDEN:
            continue
        panel = _BY_PROBE.get(probe) or Panel(f"other-{probe}", (probe,), probe, "")
        chosen[panel.id] = panel
        found.setdefault(panel.id, {}).setdefault(key, set()).add(layer)
    known = {panel.id: i for i, panel in enumerate(PANELS)}
    ids = sorted(chosen, key=lambda i: (known.get(i, len(known)), natural(i)))
    return [_panel(chosen[i], found[i], order) for i in ids]


def select(names: Iterable[str], limit: int, order: Sequence[str] = (), part: str = "") -> tuple[set[str], int]:
    """At most `limit` of the metrics whose name contains `part`, and how many are left out.

    Panels that Excite knows come first, then at most 100 others. Every quantity gets an equal share of what its probe may
    show; the whole network and layers that are executed early come first. Metrics that no panel draws count for nothing.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        probe, quantity, _ = split(name)
        key = f"{probe}/{quantity}" if quantity else probe
        if key not in _HIDDEN and part in name:
            groups.setdefault(key, []).append(name)
    total = sum(map(len, groups.values()))
    if total <= limit and len(groups) <= _MAX_OTHERS:
        return {name for group in groups.values() for name in group}, 0
    places = {layer: i for i, layer in enumerate(order)}

    def place(name: str) -> tuple[bool, int, int, str]:
        layer = split(name)[2]
        return layer != WHOLE, places.get(layer, len(places)), len(layer), layer  # layer2 before layer10

    def foreign(key: str) -> tuple[bool, int, str]:
        probe = split(key)[0]
        return probe not in _BY_PROBE, len(probe), probe

    others = list(dict.fromkeys(split(key)[0] for key in sorted(groups, key=foreign) if foreign(key)[0]))
    shown = {*_BY_PROBE, *others[:_MAX_OTHERS]}
    keys = sorted((key for key in groups if split(key)[0] in shown), key=lambda key: (foreign(key)[0], len(key), key))
    chosen: set[str] = set()
    for i, key in enumerate(sorted(keys[:limit], key=lambda key: len(groups[key]))):  # small ones leave room for others
        share = (limit - len(chosen)) // (min(len(keys), limit) - i)
        group = groups[key]
        chosen.update(group if len(group) <= share else heapq.nsmallest(share, group, place))
    return chosen, total - len(chosen)


def _panel(panel: Panel, keys: dict[str, set[str]], order: Sequence[str]) -> PanelView:
    labels = dict(panel.labels)
    wanted = list(labels)
    counts = Counter(split(key)[1] for key in keys)

    def place(key: str) -> tuple[int, int, list[tuple[int, str]]]:
        probe, quantity, _ = split(key)
        return (
            wanted.index(quantity) if quantity in wanted else len(wanted),
            panel.probes.index(probe),
            natural(key),
        )

    quantities = []
    for key in sorted(keys, key=place):
        probe, quantity, _ = split(key)
        name = labels.get(quantity, quantity or probe)
        # Two probes of one panel may call different things the same.
        twice = counts[quantity] > 1
        quantities.append(Quantity(key, f"{name} ({probe})" if twice else name, in_order(keys[key], order)))
    return PanelView(panel, tuple(quantities))


def in_order(layers: Iterable[str], order: Sequence[str] = ()) -> tuple[str, ...]:
    """The whole network first, then layers as they are executed, then the others by name."""
    places = {name: i for i, name in enumerate(order)}
    return tuple(sorted(layers, key=lambda one: (one != WHOLE, places.get(one, len(places)), natural(one))))


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts layer2 before layer10."""
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in re.findall(r"[0-9]+|[^0-9]+", text)]
