"""Theorem 2 of Training invariances, as far as it holds: how far from rank one a layer can be.

With A the matrix of what makes the channels of a junction, B of what reads them (channels as rows), gradient flow keeps
A A' − B B' where only linear maps stand between, so ‖A‖₂² ≥ ‖B‖₂² − λ_max(B B' − A A')₊ with the difference of the start. From
junction to junction ‖B‖₂² is at least ‖A_next‖₂² over a factor: min(a, b) for a layer with a input channels and b entries for
each pair of channels (Lemma 9), a sum over branches (Lemma 10: two for a residual block, not eight). The last layer is one
row for each output, and all layers have the same Frobenius norm up to a constant (Lemma 4). Through a ReLU the first step
fails: the matrix law holds on the diagonal only (`docs/theory.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, Pick
from excite._core.checks import check_model, check_norms, check_number, check_weights, model_errors
from excite._core.intercept.affine import clean_path
from excite.bounds.bound import Assumption, Bound
from excite.errors import InputError
from excite.wiring.groups import Site
from excite.wiring.junctions import Junction, attends, numbered, parameters_of
from excite.wiring.tracing import Wiring, trace

PAPER = "Training invariances"
Node = int | str  # number of a junction, "input" or "output"


@model_errors
def reduced_alignment(
    model: nn.Module,
    example: Batch,
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    *,
    tolerance: float = 1e-3,
    output: Pick = None,
    wiring: Wiring | None = None,
) -> dict[str, Bound]:
    """How far from rank one layers can be: a lower bound on ‖W‖₂²/‖W‖²_F by layer (equations 13 and 14, Training invariances).

    The value is max(1/K − D/‖W‖²_F, 1/rank), for weights trained by gradient flow. A layer is what makes the channels of a
    junction, named by its parts, "block.conv2+block.skip" for [U Z], biases included; where one layer makes several, as for
    the heads of attention, by the junction ("v>out/head0").

    Args:
        model: The model.
        example: A batch to trace it with.
        initial: Weights that training started from (a model or its state_dict); the current ones by default, which makes the
            value a statement about any weights.
        tolerance: Largest drift of the conserved quantities since ``initial``, over ‖W‖²_F.
        output: Which part of the model's output to trace, as for `excite.trace`.
        wiring: ``excite.trace(model, example)``, if you have it.

    Returns:
        A lower bound per layer. ``terms``: the factor K ("factor", 2^N_r V_c times the number of outputs), "N_r", "V_c", "D",
        "limit" 1/min(rank, K) for norms that grow without end, "printed limit" with the paper's 8^N_r, "at this norm"
        1/K − D/‖W‖²_F, the "measured" ratio, "frobenius", "1/rank" and the "drift".

    Raises:
        InputError: If ``initial`` does not fit the model.
        ModelError: If the model cannot be traced.

    Example:
        >>> import torch
        >>> from excite.bounds import reduced_alignment
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 1, bias=False))
        >>> bounds = reduced_alignment(model, torch.randn(2, 3))
        >>> {name: bound.value <= bound.terms["measured"] for name, bound in bounds.items()}
        {'0': True}
    """
    check_norms(check_weights(check_model(model)).named_parameters())
    tolerance = check_number(tolerance, "tolerance", 0)
    wiring = trace(model, example, output=output) if wiring is None else wiring
    current = {path: p.double() for path, p in parameters_of(model).items()}
    start = current if initial is None else _initial(initial, current)
    net = _Net(wiring)
    return {name: _bound(net, k, name, current, start, tolerance) for k, name in enumerate(net.names)}


def _initial(initial: nn.Module | Mapping[str, Tensor], current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = (
        parameters_of(initial) if isinstance(initial, nn.Module) else {clean_path(k): v for k, v in initial.items()}
    )
    for path, value in current.items():
        if path not in weights or weights[path].shape != value.shape:
            raise InputError(f"initial: expected {path!r} with shape {tuple(value.shape)}, as in the model")
    return {path: weights[path].detach().to(current[path]) for path in current}


@dataclass(frozen=True)
class _Edge:
    """A weight, from the junction that it reads to the one that it makes."""

    parameter: str
    before: Node
    after: Node
    factor: int  # Lemma 9: min(a, b)
    last: int  # rank at most this, as what reads the channels
    outputs: int


class _Net:
    """Junctions as nodes and weights as edges."""

    def __init__(self, wiring: Wiring):
        import networkx

        self.junctions = numbered(
            [
                Junction(g.channels, g.producers, g.consumers, "none" if g.product else g.law, g.why, attends(g))
                for g in wiring.groups
                if g.producers
            ]
        )
        made_by = [junction.made_by for junction in self.junctions]
        self.names = [layers if made_by.count(layers) == 1 else j.name for layers, j in zip(made_by, self.junctions)]
        weights = {layer.weight_name for layer in wiring.layers if layer.weight_name is not None}
        made = {s.parameter: (k, s) for k, j in enumerate(self.junctions) for s in j.before if s.parameter in weights}
        read = {s.parameter: (k, s) for k, j in enumerate(self.junctions) for s in j.after if s.parameter in weights}
        shapes = {layer.weight_name: layer.weight for layer in wiring.layers}
        self.split = [s.parameter for _, s in (*made.values(), *read.values()) if not _covers_parameter(s)]
        self.edges = []
        for path in sorted(p for p in weights if p is not None):
            numbers = shapes[path].numel()
            inputs = len(read[path][1].index) if path in read else 1
            outputs = len(made[path][1].index) if path in made else shapes[path].shape[0]
            places = max(1, numbers // (inputs * outputs))
            before: Node = read[path][0] if path in read else "input"
            after: Node = made[path][0] if path in made else "output"
            self.edges.append(_Edge(path, before, after, min(inputs, places), min(inputs, places * outputs), outputs))
        self.graph: networkx.MultiDiGraph[Node] = networkx.MultiDiGraph()
        self.graph.add_nodes_from(["input", *range(len(self.junctions)), "output"])
        self.graph.add_edges_from((e.before, e.after) for e in self.edges)
        self.acyclic = networkx.is_directed_acyclic_graph(self.graph)
        simple: networkx.DiGraph[Node] = networkx.DiGraph(self.graph)
        self.always = _chain(networkx.immediate_dominators(simple, "input"), "output", "input")
        self.next = networkx.immediate_dominators(simple.reverse(), "output")
        self.order = list(networkx.topological_sort(simple)) if self.acyclic else []

    def biases_behind(self, nodes: list[Node]) -> list[str]:
        weights = {edge.parameter for edge in self.edges}
        return [
            s.parameter
            for n in nodes
            if isinstance(n, int)
            for s in self.junctions[n].before
            if s.parameter not in weights
        ]


def _covers_parameter(site: Site) -> bool:
    return sum(len(numbers) for numbers in site.index) == site.of


def _chain(parents: Mapping[Node, Node], node: Node, root: Node) -> list[Node]:
    chain = [node]
    while node != root and node in parents:
        node = parents[node]
        chain.append(node)
    return chain


def _bound(
    net: _Net, k: int, layer: str, current: Mapping[str, Tensor], start: Mapping[str, Tensor], tolerance: float
) -> Bound:
    junction = net.junctions[k]
    matrix = junction.made(current)
    frobenius = float(matrix.square().sum())
    spectral = float(torch.linalg.matrix_norm(matrix, 2) ** 2)
    trivial = 1 / min(matrix.shape)
    name, quantity = f"Theorem 2, {PAPER}", f"‖W‖₂²/‖W‖²_F of {layer}"
    terms: dict[str, Any] = {"measured": spectral / frobenius if frobenius else 0.0, "frobenius": frobenius**0.5}
    terms["1/rank"] = trivial
    chain = _chain(net.next, k, "output")
    crossed = net.acyclic and k in net.always and chain[-1] == "output" and not net.split
    checks = [Assumption("every path crosses the layer exactly once", crossed, _why_not(net, k))]
    if not crossed:
        return Bound(name, quantity, None, "lower", terms, tuple(checks))
    between = [n for n in net.order if isinstance(n, int) and (n == k or _behind(net, k, n))]
    biases = net.biases_behind([n for n in between if n != k])
    checks.append(Assumption("no biases behind the layer", not biases, ", ".join(biases[:3])))
    between_laws = [net.junctions[n] for n in between if net.junctions[n].law != "matrix"]
    detail = "; ".join(f"{j.made_by}: {j.why}" for j in between_laws[:2])
    checks.append(
        Assumption(
            "only linear maps between it and the output: the law holds off the diagonal too", not between_laws, detail
        )
    )
    if not all(net.junctions[n].after for n in between):  # what reads the channels is a normalization: no matrix
        return Bound(name, quantity, None, "lower", terms, tuple(checks))
    factor, excess, blocks = _telescoped(net, chain, start)
    ends = [edge.parameter for edge in net.edges if edge.after == "output"]
    first = float(junction.made(start).square().sum() - sum(start[p].square().sum() for p in ends))
    constant = first / factor + excess
    drift = max(_drift(net.junctions[n], current, start) for n in between) / frobenius if frobenius else 0.0
    checks.append(Assumption("training kept the laws", drift <= tolerance, f"drift {drift:.1e} of ‖W‖²_F"))
    terms["at this norm"] = 1 / factor - constant / frobenius if frobenius else 0.0
    terms |= {"factor": factor, "N_r": blocks, "V_c": factor / 2**blocks, "D": constant, "drift": drift}
    terms |= {"limit": max(trivial, 1 / factor), "printed limit": max(trivial, 2**blocks / (8**blocks * factor))}
    value = max(trivial, terms["at this norm"]) if frobenius else 0.0
    return Bound(name, quantity, value, "lower", terms, tuple(checks))


def _why_not(net: _Net, k: int) -> str:
    if net.split:
        return f"only some channels of {net.split[0]} belong to one junction"
    if not net.acyclic:
        return "an identity skip: the stream's channels are made again and again"
    return "" if k in net.always else "other paths lead past it"


def _behind(net: _Net, k: int, node: Node) -> bool:
    import networkx

    return bool(networkx.has_path(net.graph, k, node))


def _drift(junction: Junction, current: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    return float(torch.linalg.matrix_norm(_difference(junction, current) - _difference(junction, start), 2))


def _difference(junction: Junction, at: Mapping[str, Tensor]) -> Tensor:
    """B B' − A A'."""
    made, read = junction.made(at), junction.read(at)
    return read @ read.T - made @ made.T


def _telescoped(net: _Net, chain: list[Node], start: Mapping[str, Tensor]) -> tuple[float, float, int]:
    """(K, D', blocks) with ‖A‖₂² ≥ ‖last layer‖²_F / K − D' for the first junction of `chain`, which ends in the output."""
    factor, excess, blocks = 1.0, 0.0, 0
    for node, next_node in pairwise(chain):
        excess += _excess(net, node, start) / factor  # ‖A‖₂² ≥ ‖B‖₂² − excess
        grow, constant, branched = _segment(net, node, next_node, start)  # ‖A_there‖₂² ≤ grow ‖B_here‖₂² + constant
        factor *= grow
        excess += constant / factor
        blocks += branched
    return factor, excess, blocks


def _segment(net: _Net, start_node: Node, next_node: Node, start: Mapping[str, Tensor]) -> tuple[float, float, bool]:
    ways: dict[Node, tuple[float, float]] = {start_node: (1.0, 0.0)}  # bounds ‖B‖₂² of a node by those of `start_node`
    direct = [e for e in net.edges if e.after == next_node]
    if next_node == "output" and len(direct) == 1 and direct[0].before == start_node:
        return float(direct[0].last), 0.0, False  # ‖B‖₂² ≥ ‖Fin‖²_F / rank
    for node in net.order:
        into = [e for e in net.edges if e.after == node and e.before in ways]
        if node == start_node or not into:
            continue
        grow = sum(e.factor * ways[e.before][0] for e in into)
        constant = sum(e.factor * ways[e.before][1] for e in into)
        if node == next_node:
            outputs = max(e.outputs for e in into) if next_node == "output" else 1
            return grow * outputs, constant * outputs, len(into) > 1
        ways[node] = (grow, constant + _excess(net, node, start))  # ‖B‖₂² ≤ ‖A‖₂² + excess
    raise InputError("the wiring has no way from one junction to the next")  # dominators make sure that it has


def _excess(net: _Net, node: Node, start: Mapping[str, Tensor]) -> float:
    if not isinstance(node, int):
        return 0.0
    return max(0.0, float(torch.linalg.eigvalsh(_difference(net.junctions[node], start))[-1]))
