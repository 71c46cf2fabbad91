"""ν = μ ∘ h on random graphs to 1e-12, its derivative against autograd, and counts against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.train.models.resnet import resnet
from excite.wiring import Graph, decompose, fully_connected, path_count
from excite.wiring.decomposition import edges
from models import build, same_state, state_of


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
def test_equation_2_is_the_derivative_and_the_gradient_of_the_tree_is_the_pattern(
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


def test_fully_connected_graphs() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(4, 3)), rng.normal(size=(2, 4)), rng.normal(size=(1, 2))]
    graph = fully_connected(weights, (0.1, 1.0))
    assert graph.count == 3 * 4 * 2
    x = rng.normal(size=3)
    h = x
    for w in weights[:-1]:
        h = np.where(w @ h > 0, w @ h, 0.1 * (w @ h))
    assert graph.value(x) == pytest.approx(float((weights[-1] @ h)[0]), abs=1e-14)
    assert decompose(graph).error(x) < 1e-14


def test_it_refuses_what_it_cannot_do() -> None:
    deep = fully_connected([np.ones((40, 40))] * 30 + [np.ones((1, 40))])
    assert deep.count == 40**31
    with pytest.raises(InputError, match="limit of 100000"):
        decompose(deep)
    with pytest.raises(InputError, match="cycle"):
        Graph(("i",), "o", {("i", "a"): 1.0, ("a", "b"): 1.0, ("b", "a"): 1.0, ("a", "o"): 1.0})
    with pytest.raises(InputError, match="enter an input"):
        Graph(("i",), "o", {("o", "i"): 1.0})
    with pytest.raises(InputError, match="finite"):
        Graph(("i",), "o", {("i", "o"): float("nan")})
    with pytest.raises(InputError, match="no path"):
        decompose(Graph(("i",), "o", {("i", "a"): 1.0}))
    with pytest.raises(InputError, match="no edge"):
        decompose(Graph(("i",), "o", {("i", "o"): 1.0})).derivative([1.0], ("o", "i"))
    with pytest.raises(InputError, match="2 finite inputs"):
        fully_connected([np.ones((1, 2))]).value([1.0])


def neurons(layers: list[nn.Module], shape: tuple[int, ...]) -> Graph:
    """The graph of a chain of layers, number by number, found by feeding each layer with unit vectors."""
    names, weights = [f"0.{k}" for k in range(int(np.prod(shape)))], {}
    inputs = tuple(names)
    for depth, layer in enumerate(layers, 1):
        units = torch.eye(len(names), dtype=torch.float64).view(len(names), *shape)
        if isinstance(layer, nn.MaxPool2d):
            layer = nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding)
        with torch.no_grad():
            zero = layer(torch.zeros_like(units[:1]))
            out = layer(units) - zero
        shape = tuple(out.shape[1:])
        after = [f"{depth}.{k}" for k in range(int(np.prod(shape)))]
        for a, row in zip(names, out.flatten(1)):
            weights |= {(a, after[k]): float(row[k]) for k in row.nonzero().flatten().tolist()}
        names = after
    weights |= {(name, "end"): 1.0 for name in names}
    return Graph(inputs, "end", weights)


def test_paths_of_a_model_are_those_of_its_neurons() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2, padding=1), nn.AvgPool2d(2, 1),
              nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 2)]  # fmt: skip
    layers = [layer.double() for layer in layers]
    model = nn.Sequential(*itertools.chain(*((layer, nn.ReLU()) for layer in layers)))
    x = torch.randn(3, 2, 6, 5, dtype=torch.float64)
    found = path_count(model, x)
    assert found.total == neurons(layers, (2, 6, 5)).count
    assert len(found.log10_by_output) == 2


def test_counts_of_the_shared_table() -> None:
    model, x = build("mlp")
    before = state_of(model)
    assert path_count(model, x).total == 5 * 8 * 6
    assert same_state(before, state_of(model))
    # One path for every bias and what comes behind it: 8 · 6 for the first, 6, 1.
    assert path_count(model, x, biases=True).total == 5 * 8 * 6 + 8 * 6 + 6 + 1
    assert path_count(*build("functional")).total == 5 * 7
    assert path_count(*build("products")).total == 5 * 6
    # A block maps n paths a number to 4 · 9 … inside; identity and diagonal skips add one way, free ones 4.
    identity, diagonal = path_count(*build("resnet-identity")), path_count(*build("resnet-diagonal"))
    assert identity.total == diagonal.total < path_count(*build("resnet-free")).total
    assert path_count(*build("dense")).total > 0
    with pytest.raises(ModelError, match="no column"):
        path_count(*build("transformer"))
    with pytest.raises(ModelError, match="whole numbers"):
        path_count(*build("tokens"))
    with pytest.raises(ModelError, match="tanh"):
        path_count(*build("tanh"))


def test_a_residual_chain_by_hand() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)) for _ in range(3))
            self.head = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.relu(block(x) + x)
            return self.head(x)

    # n paths into each of 5 numbers: 5 · 7 · n through the block and n past it.
    assert path_count(Residual(), torch.randn(2, 5)).total == 5 * 36**3


@pytest.mark.slow
def test_networks_of_any_size() -> None:
    deep = nn.Sequential(*[nn.Linear(100, 100) for _ in range(300)])
    found = path_count(deep, torch.randn(2, 100))
    assert found.log10 == pytest.approx(602, abs=1e-9)
    assert found.total == float("inf")
    assert str(found) == "10^602.00 paths"
    assert path_count(resnet(stages=4, width=8), torch.randn(2, 3, 32, 32)).log10 > 30
