"""A feedforward network as a multilinear function and a tree with weights ±1: the decomposition of Training invariances.

h(x) lists, for every path p from an input to the output, x_p Π_{e ∈ p} w_e. The unrolled tree μ has a leaf for every path and
weights ±1 that depend on the signs of the weights alone, and ν(x) = μ(h(x)) (Lemma 2). It exists for small networks: there
are exponentially many paths. `Graph.count` and `path_count` count them in networks of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from excite._core.checks import check_number, shown, to_array
from excite.errors import InputError

Array = NDArray[np.float64]
Edge = tuple[str, str]
Path = tuple[str, ...]  # vertices, from the input to the output
LIMIT = 100_000  # paths that are enumerated at most, by default
RELU, LINEAR = (0.0, 1.0), (1.0, 1.0)


@dataclass(frozen=True)
class Graph:
    """A feedforward network ν with one output, vertex by vertex.

    Vertices that have no edges into them and are no inputs have the value 0.

    Args:
        inputs: Names of the input vertices.
        output: Name of the output vertex.
        weights: Weights by edge (from, to).
        slopes: By vertex, the slopes of its activation left and right of zero: these two numbers are all that a positively
            homogeneous function has. Default: (0, 1), a ReLU; (1, 1) for the output and the inputs.

    Raises:
        InputError: If the graph has a cycle, an edge into an input or out of the output, or entries of wrong types.

    Example:
        >>> graph = Graph(("x",), "y", {("x", "h"): 2.0, ("h", "y"): -1.0, ("x", "y"): 0.5})
        >>> graph.value([3.0]), graph.count
        (-4.5, 2)
    """

    inputs: tuple[str, ...]
    output: str
    weights: Mapping[Edge, float]
    slopes: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        value: Any
        for field_name, value, bound_type in (
            ("inputs", self.inputs, Sequence),
            ("weights", self.weights, Mapping),
            ("slopes", self.slopes, Mapping),
        ):
            if not isinstance(value, bound_type) or isinstance(value, str):
                expected = "a tuple of vertices" if bound_type is Sequence else "a dict"
                raise InputError(f"{field_name}: expected {expected}; got {shown(value)}")
        for edge in self.weights:
            if not isinstance(edge, tuple) or len(edge) != 2:
                raise InputError(f"weights: expected edges (from, to) as keys; got {shown(edge)}")
        for name in (*self.inputs, self.output, *self.slopes, *(vertex for edge in self.weights for vertex in edge)):
            if not isinstance(name, str):
                raise InputError(f"vertices: expected strings; got {shown(name)}")
        for name, pair in self.slopes.items():
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise InputError(f"slopes of {name!r}: expected two numbers; got {shown(pair)}")
            for slope in pair:
                check_number(slope, f"slopes of {name!r}")
        if len(set(self.inputs)) != len(self.inputs) or not self.inputs:
            raise InputError("inputs: expected at least one vertex, each once")
        for edge, weight in self.weights.items():
            if edge[1] in self.inputs or edge[0] == self.output:
                raise InputError(f"edge {edge}: no edge may enter an input or leave the output")
            check_number(weight, f"edge {edge}")
        self.order  # noqa: B018  # raises for a cycle

    @cached_property
    def into(self) -> dict[str, list[str]]:
        """By vertex, the vertices with an edge to it."""
        sources: dict[str, list[str]] = {}
        for a, b in self.weights:
            sources.setdefault(b, []).append(a)
        return sources

    @cached_property
    def order(self) -> list[str]:
        """Vertices, each after all that lead to it."""
        order: list[str] = []
        state: dict[str, int] = {}
        for root in (*self.inputs, self.output, *(b for _, b in self.weights)):
            stack = [root]
            while stack:
                vertex = stack[-1]
                if state.get(vertex) is None:
                    state[vertex] = 1
                    before = self.into.get(vertex, [])
                    if any(state.get(a) == 1 for a in before):
                        raise InputError(f"the graph has a cycle through {vertex!r}: a feedforward network has none")
                    stack += [a for a in before if a not in state]
                else:
                    stack.pop()
                    if state[vertex] == 1:
                        state[vertex] = 2
                        order.append(vertex)
        return order

    def slope(self, vertex: str) -> tuple[float, float]:
        """Returns the slopes of a vertex's activation, left and right of zero."""
        plain = LINEAR if vertex == self.output or vertex in self.inputs else RELU
        return self.slopes.get(vertex, plain)

    def value(self, x: Sequence[float] | Array) -> float:
        """Returns ν(x), computed vertex by vertex.

        Args:
            x: One number per input.
        """
        post = dict(zip(self.inputs, point(self, x)))
        for vertex in self.order:
            if vertex not in post:
                pre = sum(self.weights[a, vertex] * post[a] for a in self.into.get(vertex, []))
                post[vertex] = activate(pre, self.slope(vertex))
        return float(post[self.output])

    @cached_property
    def count(self) -> int:
        """Exact number ρ of paths from an input to the output, for graphs of any size."""
        ways: dict[str, int] = dict.fromkeys(self.inputs, 1)
        for vertex in self.order:
            if vertex not in ways:
                ways[vertex] = sum(ways[a] for a in self.into.get(vertex, []))
        return ways[self.output]

    def paths(self, limit: int = LIMIT) -> list[Path]:
        """Returns all paths from an input to the output, as tuples of vertices.

        Args:
            limit: Largest number of paths to enumerate.

        Raises:
            InputError: If there are more than `limit` paths.
        """
        if self.count > limit:
            raise InputError(f"{self.count} paths: more than the limit of {limit}; raise it, or use `count`")
        complete: list[Path] = []
        stack: list[Path] = [(self.output,)]
        while stack:
            path = stack.pop()
            if path[0] in self.inputs:
                complete.append(path)
            else:
                stack += [(a, *path) for a in self.into.get(path[0], [])]
        return sorted(complete)


def fully_connected(weights: Sequence[Any], slope: tuple[float, float] = RELU) -> Graph:
    """Builds the graph of x ↦ W_L σ(⋯ σ(W_1 x)) with one output.

    Args:
        weights: Matrices W_1, …, W_L of shapes (n_k, n_{k−1}), with n_L = 1.
        slope: Slopes of σ left and right of zero. Default: ReLU.

    Returns:
        A graph with vertices named "layer.unit" and "output".

    Raises:
        InputError: If the matrices do not follow each other to one output.

    Example:
        >>> fully_connected([torch.randn(3, 2), torch.randn(1, 3)]).count
        6
    """
    if not isinstance(weights, Sequence) or isinstance(weights, str):
        raise InputError(f"weights: expected a list of matrices; got {shown(weights)}")
    matrices = [to_array("weights", w) for w in weights]
    good = matrices and all(m.ndim == 2 for m in matrices) and len(matrices[-1]) == 1
    if not good or any(a.shape[0] != b.shape[1] for a, b in pairwise(matrices)):
        raise InputError(f"expected matrices that follow each other to one output; got {[m.shape for m in matrices]}")
    names = [[f"{k}.{i}" for i in range(m.shape[1])] for k, m in enumerate(matrices)] + [["output"]]
    edges = {
        (names[k][j], names[k + 1][i]): float(m[i, j]) for k, m in enumerate(matrices) for i, j in np.ndindex(m.shape)
    }
    hidden = {name: slope for layer in names[1:-1] for name in layer}
    return Graph(tuple(names[0]), "output", edges, hidden)


def point(graph: Graph, x: Sequence[float] | Array) -> Array:
    """Checks an input of the graph and returns it as an array."""
    values = np.asarray(x, dtype=np.float64)
    if values.shape != (len(graph.inputs),) or not np.isfinite(values).all():
        raise InputError(f"expected {len(graph.inputs)} finite inputs; got shape {values.shape}")
    return values


def activate(z: float, slope: tuple[float, float]) -> float:
    """The positively homogeneous function with these slopes left and right of zero."""
    return slope[1] * z if z > 0 else slope[0] * z


def sign(w: float) -> float:
    """−1 or 1: the paper's sign has no zero."""
    return -1.0 if w < 0 else 1.0
