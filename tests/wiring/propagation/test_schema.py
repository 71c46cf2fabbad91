"""Names and arguments of ATen calls."""

from __future__ import annotations

import torch

from excite.wiring.propagation.schema import bind, is_inplace, name_of

aten = torch.ops.aten


def test_names_leave_out_namespace_overload_and_underscore() -> None:
    assert name_of(aten.add.Tensor) == name_of(aten.add_.Tensor) == "add"
    assert name_of(aten._softmax.default) == "_softmax"
    assert is_inplace(aten.relu_.default)
    assert not is_inplace(aten.relu.default)


def test_arguments_are_bound_with_their_defaults() -> None:
    x = torch.zeros(2)
    a = bind(aten.hardtanh.default, (x, -2.0), {})
    assert a.self is x
    assert (a.min_val, a.max_val) == (-2.0, 1)
    assert (a.op, a.args) == ("hardtanh", (x, -2.0))
