"""The interpreter of exported graphs, with a column made for the test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.lipschitz import bound
from excite.wiring import path_count, trace
from excite.wiring.export import exported
from excite.wiring.operators import OPERATORS
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
    assert lookup(len) is None
