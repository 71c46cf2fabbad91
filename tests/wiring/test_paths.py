"""Networks as graphs: values, counts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from excite.errors import InputError
from excite.wiring import Graph, decompose, fully_connected


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
