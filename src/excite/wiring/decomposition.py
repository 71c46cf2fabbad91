"""Lemma 2 of Training invariances, step by step: unroll (Lemma 6), pull weights back (Lemma 7), remove signs (Lemma 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from excite._core.checks import check_count, shown
from excite.errors import InputError
from excite.wiring.paths import LIMIT, Array, Edge, Graph, Path, activate, point, sign


@dataclass(frozen=True)
class Tree:
    """An unrolled network.

    Its vertices are paths to the output, as tuples of the graph's vertices; a path is fed by those that extend it by one
    edge at the far end. `weights` belong to the edge from a vertex to the one it feeds. Leaves are the paths that start in
    an input.

    Paths count as sequences of edges. Definition 9 orders them by inclusion; as sets of *vertices*, as its proof reads
    them, i → o would be included in i → a → o, and the diagram is no tree where there are skip connections.
    """

    graph: Graph
    leaves: tuple[Path, ...]
    weights: Mapping[Path, float]

    @cached_property
    def order(self) -> list[Path]:
        """Vertices that are no leaves, each after all that feed it."""
        inner = {leaf[k:] for leaf in self.leaves for k in range(1, len(leaf))}
        return sorted(inner, key=lambda path: (-len(path), path))

    def value(self, at: Sequence[float] | Array) -> float:
        """Returns the output for the values of the leaves, shape (ρ,)."""
        return float(self._forward(at)[1][(self.graph.output,)])

    def _forward(self, at: Sequence[float] | Array) -> tuple[dict[Path, float], dict[Path, float]]:
        values = np.asarray(at, dtype=np.float64)
        if values.shape != (len(self.leaves),):
            raise InputError(f"expected a value for each of {len(self.leaves)} paths; got shape {values.shape}")
        pre: dict[Path, float] = dict.fromkeys(self.order, 0.0)
        post: dict[Path, float] = {leaf: float(v) for leaf, v in zip(self.leaves, values)}
        for leaf in self.leaves:
            if len(leaf) > 1:
                pre[leaf[1:]] += self.weights[leaf] * post[leaf]
        for path in self.order:
            post[path] = activate(pre[path], self.graph.slope(path[0]))
            if len(path) > 1:
                pre[path[1:]] += self.weights[path] * post[path]
        return pre, post

    def gradient(self, at: Sequence[float] | Array) -> Array:
        """Returns ∇μ with respect to the leaves, shape (ρ,); at a kink, with the slope to the left."""
        pre, _ = self._forward(at)
        back: dict[Path, float] = {}
        for path in reversed(self.order):
            above = back[path[1:]] * self.weights[path] if len(path) > 1 else 1.0
            slope = self.graph.slope(path[0])
            back[path] = above * (slope[1] if pre[path] > 0 else slope[0])
        result = [back[leaf[1:]] * self.weights[leaf] if len(leaf) > 1 else 1.0 for leaf in self.leaves]
        return np.array(result)


@dataclass(frozen=True)
class Decomposition:
    """The decomposition ν = μ ∘ h of one graph (Lemma 2 of Training invariances).

    Attributes:
        graph: The network ν.
        paths: Its paths, in the order of the entries of h.

    Example:
        >>> parts = decompose(fully_connected([[[1.0, -2.0]], [[3.0]]]))
        >>> len(parts.paths)
        2
    """

    graph: Graph
    paths: tuple[Path, ...]

    @cached_property
    def _products(self) -> Array:
        return np.array([np.prod([self.graph.weights[e] for e in edges(p)]) for p in self.paths])

    @cached_property
    def _starts(self) -> NDArray[np.intp]:
        number = {name: k for k, name in enumerate(self.graph.inputs)}
        return np.array([number[p[0]] for p in self.paths], dtype=np.intp)

    def h(self, x: Sequence[float] | Array) -> Array:
        """Returns x_p Π w_e for every path, shape (ρ,) (Definition 4).

        Args:
            x: One number per input.
        """
        return np.asarray(point(self.graph, x)[self._starts] * self._products)

    @cached_property
    def unrolled(self) -> Tree:
        """The tree with the weights of the network: fed with x_p it computes ν (Lemma 6)."""
        return self._tree(lambda path: self.graph.weights[path[0], path[1]])

    @cached_property
    def absolute(self) -> Tree:
        """μ': weights sgn(w_e); fed with |h_p| of weights, x_p Π |w_e|, it computes ν (Lemma 5)."""
        return self._tree(lambda path: sign(self.graph.weights[path[0], path[1]]))

    @cached_property
    def mu(self) -> Tree:
        """μ of Lemma 2: as μ', and the edge at each leaf also carries the sign of the whole path, sgn Π w_e.

        The paper puts that sign on an edge of its own, with a linear vertex between: a product of two signs is a sign.
        """
        tree = self.absolute
        signs = dict(tree.weights)
        for leaf in tree.leaves:
            if len(leaf) > 1:
                signs[leaf] *= float(np.prod([sign(self.graph.weights[e]) for e in edges(leaf)]))
        return Tree(self.graph, tree.leaves, signs)

    def value(self, x: Sequence[float] | Array) -> float:
        """Returns μ(h(x)), which is ν(x) up to rounding."""
        return self.mu.value(self.h(x))

    def error(self, x: Sequence[float] | Array) -> float:
        """Returns |ν(x) − μ(h(x))| over the larger of 1 and Σ |h|: rounding, if the lemma is right."""
        return abs(self.graph.value(x) - self.value(x)) / max(1.0, float(np.abs(self.h(x)).sum()))

    def active(self, x: Sequence[float] | Array) -> Array:
        """Returns Z_p, the product of the slopes along each path at x, shape (ρ,). It is ∇μ at h(x)."""
        post = dict(zip(self.graph.inputs, point(self.graph, x)))
        slopes = {name: self.graph.slope(name)[int(v > 0)] for name, v in post.items()}
        for vertex in self.graph.order:
            if vertex not in post:
                pre = sum(self.graph.weights[a, vertex] * post[a] for a in self.graph.into.get(vertex, []))
                slopes[vertex] = self.graph.slope(vertex)[int(pre > 0)]
                post[vertex] = activate(pre, self.graph.slope(vertex))
        return np.array([np.prod([slopes[v] for v in p[1:]]) for p in self.paths])

    def derivative(self, x: Sequence[float] | Array, edge: Edge) -> float:
        """Returns ∂ν/∂w_e = Σ_{p ∋ e} [∇μ(h(x))]_p x_p Π_{f ∈ p, f ≠ e} w_f (equation 2).

        Args:
            x: One number per input.
            edge: The edge e, (from, to).

        Raises:
            InputError: If the graph has no such edge, or a weight on a path is 0.
        """
        if edge not in self.graph.weights:
            raise InputError(f"no edge {edge}")
        if (self._products == 0).any():
            raise InputError("a weight on a path is 0: the tree has a kink there, and equation 2 no meaning")
        slopes, start = self.mu.gradient(self.h(x)), point(self.graph, x)[self._starts]
        total = 0.0
        for k, path in enumerate(self.paths):
            on = edges(path)
            if edge in on:
                total += slopes[k] * start[k] * float(np.prod([self.graph.weights[f] for f in on if f != edge]))
        return total

    def _tree(self, weight: Callable[[Path], float]) -> Tree:
        vertices = {leaf[k:] for leaf in self.paths for k in range(len(leaf) - 1)}
        return Tree(self.graph, self.paths, {path: weight(path) for path in vertices})


def decompose(graph: Graph, limit: int = LIMIT) -> Decomposition:
    """Writes a network as ν = μ ∘ h: a multilinear function and a tree with weights ±1 (Lemma 2 of Training invariances).

    h(x) lists x_p Π w_e over all paths p; μ depends on the signs of the weights alone.

    Args:
        graph: A small network, for example `fully_connected(weights)`.
        limit: Largest number of paths.

    Returns:
        h, μ and the trees of the proof.

    Raises:
        InputError: If the graph has more than `limit` paths, or none.

    Example:
        >>> parts = decompose(fully_connected([[[1.0, -2.0]], [[3.0]]]))
        >>> parts.h([1.0, 1.0])
        array([ 3., -6.])
    """
    if not isinstance(graph, Graph):
        raise InputError(f"graph: expected a Graph, such as fully_connected(weights); got {shown(graph)}")
    paths = graph.paths(check_count(limit, "limit"))
    if not paths:
        raise InputError("no path leads from an input to the output")
    return Decomposition(graph, tuple(paths))


def edges(path: Path) -> list[Edge]:
    """The edges along a path."""
    return list(pairwise(path))
