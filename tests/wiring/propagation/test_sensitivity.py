"""Bounds on how far tensors can move."""

from __future__ import annotations

import torch

from excite.wiring.propagation.sensitivity import LipschitzContext, Sensitivity


def node(shape: tuple[int, ...]) -> torch.fx.Node:
    made = torch.fx.Graph().placeholder("x")
    made.meta["val"] = torch.zeros(shape)
    return made


def test_the_2_norm_multiplies_and_the_inf_norm_goes_by_elements() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.0, 0.5]], dtype=torch.float64)
    two, inf = LipschitzContext("2"), LipschitzContext("inf")
    moved = two.apply(node((2,)), Sensitivity(3.0, (2,)), "layer", lambda: 4.0, lambda t: t)
    assert (moved.factor, two.terms) == (12.0, [("layer", 4.0)])
    start = Sensitivity.from_deviation(torch.tensor([1.0, 0.25], dtype=torch.float64))
    moved = inf.apply(node((2,)), start, "layer", lambda: 0.0, lambda t: weight.abs() @ t)
    assert moved.deviation is not None
    assert moved.deviation.tolist() == [1.5, 0.125]
    assert inf.terms == [("layer", 1.5)]


def test_parts_that_change_nothing_are_no_terms() -> None:
    ctx = LipschitzContext("2")
    ctx.apply(node((2,)), Sensitivity(3.0, (2,)), "relu", lambda: 1.0, lambda t: t)
    assert not ctx.terms
    ctx.combine(node((2,)), "sum", lambda: 5.0, lambda: torch.ones(2))
    assert ctx.branches
