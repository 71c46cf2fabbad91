"""The table as a whole."""

from __future__ import annotations

import pytest
import torch

from excite.wiring.operators import OPERATORS
from excite.wiring.operators.row import LINEAR, add_row, product_of


def test_rows_are_atens_operators() -> None:
    assert [name for name in OPERATORS if not hasattr(torch.ops.aten, name)] == []


def test_an_operator_has_one_row() -> None:
    with pytest.raises(ValueError, match="two rows for relu"):
        add_row("relu", pieces=LINEAR)


def test_rows_that_propagate_channels_say_which_law_survives() -> None:
    assert [name for name, row in OPERATORS.items() if row.channels and row.conservation is None] == []


def test_a_product_lists_its_factors() -> None:
    assert product_of("self/end", "weight").factors == (("self", "end"), ("weight",))
