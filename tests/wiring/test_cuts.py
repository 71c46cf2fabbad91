"""Lemma 4: cuts that every path crosses exactly once, found by hand and checked on gradients."""

from __future__ import annotations

import pytest
import torch

from excite.wiring import trace
from models import CASES, build

BY_HAND: dict[str, list[tuple[str, str]]] = {
    "linear": [],
    "tanh": [],
    "mlp": [("0.weight 0.bias 2.bias", "4.weight"), ("2.weight 2.bias", "4.weight")],
    "convolutional": [
        ("0.weight 0.bias 3.bias 7.bias", "9.weight"),
        ("3.weight 3.bias 7.bias", "9.weight"),
        ("7.weight 7.bias", "9.weight"),
    ],
    "resnet-identity": [  # the stream and the blocks feed each other: only the first layer and the last are cuts
        ("stem.weight stem.bias block1.conv2.bias block2.conv2.bias block1.conv1.bias block2.conv1.bias", "head.weight")
    ],
    "resnet-norm": [
        ("stem.weight stem.bias block1.bn2.weight block1.bn2.bias block2.bn2.weight block2.bn2.bias",
         "block1.conv1.weight block2.conv1.weight head.weight"),
        ("block1.bn1.weight block1.bn1.bias", "block1.conv2.weight"),
        ("block2.bn1.weight block2.bn1.bias", "block2.conv2.weight"),
    ],
    "dense": [
        ("first.weight first.bias second.bias third.bias", "head.weight"),
        ("second.weight third.weight[part] second.bias third.bias", "head.weight[part]"),
        ("third.weight third.bias", "head.weight[part]"),
    ],
    "shared": [("enter.weight enter.bias again.bias", "leave.weight")],  # the shared weight is crossed twice
    "tokens": [("embed.weight hidden.bias", "head.weight"), ("hidden.weight hidden.bias", "head.weight")],
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_cuts_are_those_found_by_hand(name: str) -> None:
    model, x = build(name)
    assert [(" ".join(cut.enters), " ".join(cut.leaves)) for cut in trace(model, x).cuts()] == BY_HAND[name]


def test_free_residual_blocks_are_crossed_as_in_theorem_1() -> None:
    """[Y; Z] in front of the hidden channels, [U Z] behind them: cases 4, 6 and 7."""
    model, x = build("resnet-free")
    weights = [{path for path in cut.enters if path.endswith("weight")} for cut in trace(model, x).cuts()]
    assert weights == [
        {"stem.weight"},
        {"block1.conv1.weight", "block1.skip.weight"},
        {"block1.conv2.weight", "block1.skip.weight"},
        {"block2.conv1.weight", "block2.skip.weight"},
        {"block2.conv2.weight", "block2.skip.weight"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_lemma_4_edge_wise_invariance(name: str) -> None:
    """Σ w·g over what enters equals Σ w·g over what leaves, so gradient flow conserves the difference of squares."""
    model, x = build(name)
    wiring = trace(model, x, output=CASES[name].pick)
    torch.manual_seed(0)
    out = model(x)
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
    sum((part - 1).square().sum() for part in parts).backward()  # type: ignore[union-attr]
    parameters = dict(model.named_parameters())
    for cut in wiring.cuts():
        sides = {"producers": 0.0, "consumers": 0.0}
        for number in cut.groups:
            for side in sides:
                for site in getattr(wiring.groups[number], side):
                    p = parameters[site.parameter]
                    if p.grad is not None:
                        sides[side] += float((site.rows(p.detach()) * site.rows(p.grad)).sum())
        assert sides["producers"] == pytest.approx(sides["consumers"], rel=1e-9, abs=1e-12)


def test_the_value_of_a_cut_is_entering_minus_leaving_squares() -> None:
    model, x = build("mlp")
    wiring = trace(model, x)
    first = wiring.cuts()[0].value(wiring.groups, dict(model.named_parameters()))
    by_hand = sum(p.square().sum() for k, p in model.named_parameters() if k in ("0.weight", "0.bias", "2.bias"))
    torch.testing.assert_close(first, (by_hand - model[4].weight.square().sum()).detach())  # type: ignore[index, union-attr, operator]


def test_definition_6_as_printed_is_refuted_by_one_linear_unit() -> None:
    """f = w₁x₁ + w₂x₂: taking away {w₁} cuts x₁ off and leaves a graph that is not connected, no path has two edges of it,
    and the same for {w₂}. As printed both are layers and w₁² − w₂² is conserved. At w = (1, 1), x = (1, 0), y = 0 gradient
    flow changes it at the rate −2. A path has to cross the cut exactly once."""
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    (0.5 * (w @ x) ** 2).backward()
    flow = -2 * w.detach() * w.grad  # type: ignore[operator]  # of w²
    assert float(flow[0] - flow[1]) == -2
