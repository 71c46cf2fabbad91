"""ν = μ ∘ h on random graphs to 1e-12, and its derivative against autograd."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from excite.errors import InputError
from excite.wiring import Graph, decompose
from excite.wiring.decomposition import edges


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, np.ndarray]:
    """Any DAG on up to 8 vertices, with ReLUs, leaky ReLUs, absolute values and linear vertices, and a point."""
    inputs, hidden = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    names = [*(f"i{k}" for k in range(inputs)), *(f"v{k}" for k in range(hidden)), "o"]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = {}
    for a, b in itertools.combinations(names, 2):
        if not b.startswith("i") and draw(st.integers(0, 3)):
            weights[a, b] = float(rng.normal()) if draw(st.integers(0, 9)) else 0.0
    weights.setdefault((names[0], "o"), 0.5)
    kinds = [(0.0, 1.0), (0.1, 1.0), (1.0, 1.0), (-1.0, 1.0)]
    slopes = {name: kinds[draw(st.integers(0, 3))] for name in names if name[0] in "vo"}
    return Graph(tuple(names[:inputs]), "o", weights, slopes), rng.normal(size=inputs)


@settings(max_examples=60)
@given(graphs())
def test_lemmas_2_5_and_6(case: tuple[Graph, np.ndarray]) -> None:
    graph, x = case
    d = decompose(graph)
    truth = graph.value(x)
    scale = max(1.0, float(np.abs(d.h(x)).sum()))
    place = {name: k for k, name in enumerate(graph.inputs)}
    starts = np.array([x[place[p[0]]] for p in d.paths])
    absolute = [x[place[p[0]]] * np.prod([abs(graph.weights[e]) for e in edges(p)]) for p in d.paths]
    assert abs(d.unrolled.value(starts) - truth) <= 1e-12 * scale  # Lemma 6
    assert abs(d.absolute.value(absolute) - truth) <= 1e-12 * scale  # Lemma 5
    assert d.error(x) <= 1e-12  # Lemma 2
    assert set(np.abs(list(d.mu.weights.values()))) <= {1.0}
    assert len(d.paths) == graph.count == len(set(d.paths))


@settings(max_examples=40)
@given(graphs())
def test_the_tree_depends_on_the_signs_of_weights_alone(case: tuple[Graph, np.ndarray]) -> None:
    graph, _ = case
    other = Graph(graph.inputs, graph.output, {e: 3.7 * w for e, w in graph.weights.items()}, graph.slopes)
    assert decompose(graph).mu.weights == decompose(other).mu.weights


def autograd(graph: Graph, x: np.ndarray) -> tuple[dict[tuple[str, str], float], float]:
    """Derivatives by edge, and the smallest distance of a vertex to its kink."""
    weights = {e: torch.tensor(w, dtype=torch.float64, requires_grad=True) for e, w in graph.weights.items()}
    post = {name: torch.tensor(v) for name, v in zip(graph.inputs, x)}
    nearest = np.inf
    for vertex in graph.order:
        if vertex not in post:
            pre = sum(
                (weights[a, vertex] * post[a] for a in graph.into.get(vertex, [])), torch.zeros((), dtype=torch.float64)
            )
            low, high = graph.slope(vertex)
            if vertex in graph.into and low != high:
                nearest = min(nearest, abs(float(pre.detach())))
            post[vertex] = torch.where(pre > 0, high * pre, low * pre)
    found = torch.autograd.grad(post[graph.output], list(weights.values()), allow_unused=True, materialize_grads=True)
    return {e: float(g) for e, g in zip(weights, found)}, nearest


@settings(max_examples=60)
@given(graphs())
def test_equation_2_is_the_derivative_and_tree_gradient(
    case: tuple[Graph, np.ndarray],
) -> None:
    """∇μ(h(x)) = Z(x), the products of slopes along paths: equations 2 and 3 say the same wherever they are defined."""
    graph, x = case
    truth, nearest = autograd(graph, x)
    if nearest < 1e-9:
        return
    d = decompose(graph)
    if not d.h(np.ones_like(x)).all():
        with pytest.raises(InputError, match="a weight on a path is 0"):
            d.derivative(x, next(iter(graph.weights)))
        return
    np.testing.assert_allclose(d.mu.gradient(d.h(x)), d.active(x), rtol=0, atol=1e-12)
    for edge, value in truth.items():
        scale = max(1.0, float(np.abs(d.h(x)).sum()), abs(value))
        assert abs(d.derivative(x, edge) - value) <= 1e-12 * scale
    assert float(d.active(x) @ d.h(x)) == pytest.approx(
        graph.value(x), abs=1e-12 * max(1.0, float(np.abs(d.h(x)).sum()))
    )


def test_paths_as_sets_of_vertices_give_no_tree() -> None:
    """The proof of Lemma 6 reads paths as sets of vertices: with i → a → o and i → o, {i, o} ⊂ {i, a, o} is one smaller,
    so the diagram of inclusion has 4 edges on 4 vertices. As sequences of edges it has 3."""
    graph = Graph(("i",), "o", {("i", "a"): 1.0, ("a", "o"): 1.0, ("i", "o"): 1.0})
    d = decompose(graph)
    vertices = {leaf[k:] for leaf in d.paths for k in range(len(leaf))}
    assert len(vertices) == 4
    inclusions = [(p, q) for p in vertices for q in vertices if set(p) < set(q) and len(q) == len(p) + 1]
    assert len(inclusions) == 4
    assert len(d.mu.weights) == 3
