"""The interpreter of exported graphs, with a column made for the test."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.lipschitz import along, bound
from excite.wiring import path_count, trace
from excite.wiring.export import exported
from excite.wiring.operators import OPERATORS
from excite.wiring.operators.row import OVERLOADS
from excite.wiring.propagation.interpreter import Interpreter, leaves, lookup


class Numbers(Interpreter):
    """Computes the model itself: every rule is the operator."""

    column = "paths"
    followed = (Tensor,)

    def __init__(self, model: nn.Module, x: Tensor):
        super().__init__(None)
        self._model, self._x = model, x

    def parameter(self, node: torch.fx.Node, path: str) -> Tensor:
        return self._model.get_parameter(path).detach()

    def input(self, node: torch.fx.Node) -> Tensor:
        return self._x

    def apply(self, rule: Any, node: torch.fx.Node, arguments: Any) -> Any:
        return arguments.target(*arguments.args, **arguments.kwargs)


def test_it_visits_all_nodes_with_their_arguments() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    x = torch.randn(2, 1, 6, 6)
    (result,) = leaves(Numbers(model, x).run(exported(model, x)))
    torch.testing.assert_close(result, model(x).detach())


def test_a_missing_column_is_named_with_its_operator() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)), torch.zeros(2, 3)
    with pytest.raises(ModelError, match=r"layer_norm \(in 1\): the operator table .* has no column 'lipschitz'"):
        bound(model, x)
    with pytest.raises(ModelError, match=r"tanh \(in 2\): the operator table .* has no column 'paths'"):
        path_count(model, x)
    assert trace(model, x).groups[-1].why == "tanh between 1 and 3 is not positively homogeneous"


def test_rows_are_found_by_overload_and_in_place_variant() -> None:
    for target in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Scalar, torch.ops.aten.add.Scalar):
        assert lookup(target) is OPERATORS["add"]
    assert lookup(torch.ops.aten.gcd.default) is None
    assert lookup(torch.ops.aten.scatter.src) is OPERATORS["scatter"]
    for other in (torch.ops.aten.scatter.reduce, torch.ops.aten.scatter_.value_reduce, torch.ops.aten.add.out):
        assert lookup(other) is None
    assert lookup(len) is None


class Multiplying(nn.Module):
    """`scatter.reduce`, an overload of `scatter` that multiplies two signals."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        places = torch.arange(4).expand(len(h), 4)
        return self.last(h.scatter(1, places, 2 * h, reduce="multiply"))


@pytest.mark.filterwarnings("ignore:The reduce argument")
def test_an_overload_with_other_semantics_is_refused_by_name() -> None:
    model, x = Multiplying(), torch.randn(2, 3)
    for analysis in (bound, path_count, lambda model, x: along(model, x, -x)):
        with pytest.raises(ModelError, match=r"scatter\.reduce"):
            analysis(model, x)
    assert trace(model, x).groups[0].why.startswith("scatter.reduce between first and last has no column 'channels'")


# Overloads of operators in the table that no rule was written for: results in another tensor, names of axes, other functions,
# and those of TorchScript for numbers, strings and lists, which no graph of tensors contains.
REFUSED = re.compile(
    r".*[oO]ut.*|.*name.*|U|L|a|t|result|inverse|eigenvalues|values.*|dim_(max|min|values)|(value_)?reduce|quantized"
    r"|int|float|complex|bool|str|any|enum|device|left_t|right_|int_to_int|(int|float|complex|Scalar)_(int|float|complex|Scalar)"
    r"|(int|float|bool|str|Tensor)_list|list_\w+|Dict_\w+|Tensor"
)


def test_every_overload_is_known_or_refused_on_purpose() -> None:
    packets = {name: getattr(torch.ops.aten, name, None) for name in OPERATORS}
    overloads = {overload for packet in packets.values() if packet is not None for overload in packet.overloads()}
    assert len(overloads) > 60
    assert {overload for overload in overloads - OVERLOADS if not REFUSED.fullmatch(overload)} == set()
    assert overloads >= OVERLOADS
