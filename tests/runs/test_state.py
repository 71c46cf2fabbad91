from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from excite.errors import InputError, RunError
from excite.runs.state import flatten, unflatten

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randint(-3, 300, shape, generator=generator)
    return values.to(draw(st.sampled_from(DTYPES)))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"), max_size=8)
keys = st.text("ab/~0", max_size=4) | st.integers(-3, 3)
trees = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, order of keys and every bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


@pytest.mark.slow
@settings(max_examples=300)
@given(trees)
def test_unflatten_undoes_flatten(tree: Any) -> None:
    table, structure = flatten(tree)
    assert same(tree, unflatten(table, structure))


def test_paths_that_join_to_the_same_text_stay_apart() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    tree = {"a/b": one, "a": {"b": two}, "a/b~2": torch.full((1,), 2.0)}
    assert same(tree, unflatten(*flatten(tree)))


def test_tensors_lie_under_readable_names() -> None:
    table, _ = flatten({"model": {"0.weight": torch.zeros(2)}, "optimizer": {"state": {0: {"step": torch.ones(())}}}})
    assert list(table) == ["model/0.weight", "optimizer/state/0/step"]


def test_optimizer_and_random_states_survive() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    numpy_state = np.random.RandomState(3).get_state()
    tree = {
        "optimizer": optimizer.state_dict(),
        "python": random.Random(3).getstate(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
    }
    assert same(tree, unflatten(*flatten(tree)))


@pytest.mark.parametrize("bad", [object(), {1, 2}, np.float32(1), np.zeros(2), b"bytes", 1j, {(1, 2): 3}, {True: 1}])
def test_other_objects_are_refused_with_their_place(bad: Any) -> None:
    with pytest.raises(InputError, match="'model/x'"):
        flatten({"model": {"x": bad}})


@pytest.mark.parametrize("text", ["", "{}", '["what"]', "[]", '["tensor","missing"]', '["dict",[1]]', '["dict",1]'])
def test_a_damaged_structure_is_a_run_error(text: str) -> None:
    with pytest.raises(RunError, match="structure"):
        unflatten({}, text)


def test_structure_is_json() -> None:
    assert json.loads(flatten({"a": [1, (2.5, None)]})[1]) == ["dict", ["a", ["list", 1, ["tuple", 2.5, None]]]]
