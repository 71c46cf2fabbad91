"""The wiring as text."""

from __future__ import annotations

import pytest

from excite.wiring import trace
from models import build


@pytest.mark.parametrize("name", ["mlp", "transformer", "resnet-norm", "tanh", "weight-norm", "dense"])
def test_the_table_fits_a_terminal_and_names_everything(name: str) -> None:
    model, x = build(name)
    wiring = trace(model, x)
    text = str(wiring)
    assert max(map(len, text.splitlines())) <= 100
    assert all(layer.name in text for layer in wiring.layers)
    assert all(group.law in text for group in wiring.groups)
    rows = wiring.rows()
    assert len(rows["layers"]) == len(wiring.layers)
    assert len(rows["groups"]) == len(wiring.groups)
    assert sum(row["parameters"] for row in rows["layers"]) == sum(layer.parameters for layer in wiring.layers)
