"""Laws written down by hand, construct by construct, along integrated gradient flow; and `excite trace` claims the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from excite.train import gradient_flow
from excite.wiring import trace

from .zoo import Net

Weights = dict[str, Tensor]
IMAGE, WORDS, VECTOR = (2, 6, 6), (3, 4), (4,)


def rows(w: Weights, layer: str) -> Tensor:
    """Squared norm of what makes each channel: its row of the weight and its bias."""
    made = w[f"{layer}.weight"].flatten(1).square().sum(1)
    return made + w[f"{layer}.bias"].square() if f"{layer}.bias" in w else made


def columns(w: Weights, layer: str, channels: int) -> Tensor:
    """Squared norm of what reads each channel, all its places together."""
    return w[f"{layer}.weight"].square().sum(0).reshape(channels, -1).sum(1)


def stacked(w: Weights, name: str, third: int, head: int) -> Tensor:
    """Weights beside biases of queries, keys or values of one head of two, in a model of width 4: (2, 5)."""
    both = torch.cat([w[f"{name}.in_proj_weight"], w[f"{name}.in_proj_bias"][:, None]], 1)
    return both[4 * third + 2 * head : 4 * third + 2 * head + 2]


def heads(w: Weights) -> Tensor:
    """Whole matrices per head: queries against keys, values against outputs."""
    found = []
    for head in range(2):
        q, k, v = (stacked(w, "0", third, head) for third in range(3))
        o = w["0.out_proj.weight"][:, 2 * head : 2 * head + 2]
        found += [q @ q.T - k @ k.T, v @ v.T - o.T @ o]
    return torch.stack(found)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def block(m: Net, x: Tensor) -> Tensor:
    x = F.relu(m.first(x))  # type: ignore[operator]
    return m.last(F.relu(m.U(F.relu(m.Y(x))) + m.Z(x)))  # type: ignore[operator, no-any-return]


def crossings(w: Weights) -> Tensor:
    """Squared norms of cuts: [U Z] against the last layer, and the first against [Y; Z]."""
    size = {name: w[f"{name}.weight"].square().sum() for name in ("first", "Y", "U", "Z", "last")}
    return torch.stack([size["U"] + size["Z"] - size["last"], size["first"] - size["Y"] - size["Z"]])


@dataclass(frozen=True)
class Construct:
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    law: Callable[[Weights], Tensor]
    claimed: dict[str, str]  # first producer of a group: its law


def images(*middle: nn.Module, channels: int, places: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *middle, nn.Flatten(), nn.Linear(channels * places, 1))


def free_block() -> dict[str, nn.Module]:
    sizes = {"first": (4, 5), "Y": (5, 3), "U": (3, 4), "Z": (5, 4), "last": (4, 1)}
    return {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 1))  # smooth: batch normalization makes kinks stiff


def product(gate: Callable[[Tensor], Tensor]) -> nn.Module:
    parts = {"a": nn.Linear(4, 5), "b": nn.Linear(4, 5), "c": nn.Linear(5, 1)}
    return Net(lambda m, x: m.c(gate(m.a(x)) * m.b(x)), **parts)  # type: ignore[operator]


CONSTRUCTS = {
    "max pooling": Construct(
        lambda: images(nn.MaxPool2d(2), channels=4, places=4), IMAGE,
        lambda w: rows(w, "0") - columns(w, "4", 4), {"0": "channel"},
    ),
    "average pooling": Construct(
        lambda: images(nn.AvgPool2d(2), channels=4, places=4), IMAGE,
        lambda w: rows(w, "0") - columns(w, "4", 4), {"0": "channel"},
    ),
    "grouped convolution": Construct(
        lambda: images(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), channels=6, places=4), IMAGE,
        # (6, 2, 3, 3): the first three filters read channels 0 and 1, the others 2 and 3
        lambda w: torch.cat([
            rows(w, "0") - w["2.weight"].square().reshape(2, 3, 2, 9).sum((1, 3)).flatten(),
            rows(w, "2") - columns(w, "5", 6),
        ]), {"0": "channel", "2": "channel"},
    ),
    "depthwise convolution": Construct(
        lambda: images(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), channels=4, places=4), IMAGE,
        lambda w: torch.cat([
            rows(w, "0") - w["2.weight"].square().sum((1, 2, 3)), rows(w, "2") - columns(w, "5", 4)
        ]), {"0": "channel", "2": "channel"},
    ),
    "weight sharing": Construct(
        lambda: Net(
            lambda m, x: m.leave(F.relu(m.again(F.relu(m.again(F.relu(m.enter(x))))))),  # type: ignore[operator]
            enter=nn.Linear(4, 5, bias=False), again=nn.Linear(5, 5, bias=False), leave=nn.Linear(5, 1),
        ), VECTOR,
        lambda w: rows(w, "enter") + rows(w, "again") - columns(w, "again", 5) - columns(w, "leave", 5),
        {"enter": "channel"},
    ),
    "a transformer's MLP with ReLU": Construct(
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), nn.Linear(4, 1)), WORDS,
        lambda w: rows(w, "0.linear1") - columns(w, "0.linear2", 6), {"0.linear1": "channel"},
    ),
    "attention": Construct(
        lambda: nn.Sequential(Attention(4, 2, batch_first=True), nn.Linear(4, 1)), WORDS, heads,
        {"0.in_proj_weight": "matrix"},
    ),
    "the affine pair of a normalization": Construct(
        lambda: normed(nn.BatchNorm1d(5)), VECTOR,
        lambda w: w["1.weight"].square() + w["1.bias"].square() - columns(w, "2", 5), {"1": "channel"},
    ),
    "in front of a batch normalization": Construct(
        lambda: normed(nn.BatchNorm1d(5, eps=1e-13)), VECTOR, lambda w: rows(w, "0"), {"0": "norm"},
    ),
    "in front of a layer normalization": Construct(
        lambda: normed(nn.LayerNorm(5, eps=1e-13)), VECTOR, lambda w: rows(w, "0").sum(), {"0": "norm"},
    ),
    "cuts of a free residual block": Construct(
        lambda: Net(block, **free_block()), VECTOR, crossings, {"first": "channel", "Y": "channel", "U": "channel"},
    ),
    "a product with a ReLU gate": Construct(
        lambda: product(F.relu), VECTOR,
        lambda w: torch.cat([rows(w, "a") - columns(w, "c", 5), rows(w, "b") - columns(w, "c", 5)]),
        {"a": "channel", "b": "channel"},
    ),
    "a product without activation": Construct(
        lambda: product(lambda h: h), VECTOR,
        lambda w: torch.cat([rows(w, "a") - columns(w, "c", 5), rows(w, "b") - columns(w, "c", 5)]),
        {"a": "channel", "b": "channel"},
    ),
    "a product with a smooth gate": Construct(
        lambda: product(F.silu), VECTOR, lambda w: rows(w, "b") - columns(w, "c", 5), {"a": "none", "b": "channel"},
    ),
    "a gate for two products": Construct(
        lambda: Net(
            lambda m, x: m.c(F.relu(m.a(x)) * m.b(x)) + m.e(F.relu(m.a(x)) * m.d(x)),  # type: ignore[operator]
            a=nn.Linear(4, 5), b=nn.Linear(4, 5), c=nn.Linear(5, 1), d=nn.Linear(4, 5), e=nn.Linear(5, 1),
        ), VECTOR,
        lambda w: torch.cat([
            rows(w, "a") - columns(w, "c", 5) - columns(w, "e", 5),
            rows(w, "b") - columns(w, "c", 5), rows(w, "d") - columns(w, "e", 5),
        ]), {"a": "channel", "b": "channel", "d": "channel"},
    ),
    "a square": Construct(
        lambda: Net(lambda m, x: m.c(m.a(x) * m.a(x)), a=nn.Linear(4, 5), c=nn.Linear(5, 1)), VECTOR,  # type: ignore[operator]
        lambda w: rows(w, "a") - 2 * columns(w, "c", 5), {"a": "channel"},
    ),
    "a square of a ReLU": Construct(
        lambda: Net(lambda m, x: m.c(F.relu(m.a(x)) ** 2), a=nn.Linear(4, 5), c=nn.Linear(5, 1)), VECTOR,  # type: ignore[operator]
        lambda w: rows(w, "a") - 2 * columns(w, "c", 5), {"a": "channel"},
    ),
    "factors of a product that is the output": Construct(
        lambda: Net(lambda m, x: F.relu(m.a(x)) * m.b(x), a=nn.Linear(4, 5), b=nn.Linear(4, 5)), VECTOR,  # type: ignore[operator]
        lambda w: rows(w, "a") - rows(w, "b"), {"a": "channel"},
    ),
    "a gated convolution": Construct(
        lambda: Net(
            lambda m, x: m.c(F.avg_pool2d(m.a(x) * m.b(x), 2).flatten(1)),  # type: ignore[operator]  # smooth: kinks would be slid along
            a=nn.Conv2d(2, 4, 3), b=nn.Conv2d(2, 4, 3), c=nn.Linear(16, 1),
        ), IMAGE,
        lambda w: torch.cat([rows(w, "a") - columns(w, "c", 4), rows(w, "b") - columns(w, "c", 4)]),
        {"a": "channel", "b": "channel"},
    ),
    "a gated linear unit": Construct(
        lambda: nn.Sequential(nn.Linear(4, 10), nn.GLU(), nn.Linear(5, 1)), VECTOR,
        lambda w: rows(w, "0")[:5] - columns(w, "2", 5), {},
    ),
    "linear layers": Construct(
        lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 1)), VECTOR,
        lambda w: w["0.weight"] @ w["0.weight"].T - w["1.weight"].T @ w["1.weight"], {"0": "matrix"},
    ),
}  # fmt: skip
BROKEN = {
    "the smooth gate of a product": Construct(
        lambda: product(F.silu), VECTOR, lambda w: rows(w, "a") - columns(w, "c", 5), {"a": "none", "b": "channel"},
    ),
    "the gate of a gated linear unit": Construct(
        lambda: nn.Sequential(nn.Linear(4, 10), nn.GLU(), nn.Linear(5, 1)), VECTOR,
        lambda w: rows(w, "0")[5:] - columns(w, "2", 5), {},
    ),
    "a square, its reader counted once": Construct(
        lambda: Net(lambda m, x: m.c(m.a(x) * m.a(x)), a=nn.Linear(4, 5), c=nn.Linear(5, 1)), VECTOR,  # type: ignore[operator]
        lambda w: rows(w, "a") - columns(w, "c", 5), {"a": "channel"},
    ),
    "a transformer's MLP with GELU": Construct(
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 6, 0.0, activation="gelu", batch_first=True), nn.Linear(4, 1)
        ), WORDS, lambda w: rows(w, "0.linear1") - columns(w, "0.linear2", 6), {"0.linear1": "none"},
    ),
    "tanh": Construct(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), VECTOR,
        lambda w: rows(w, "0") - columns(w, "2", 5), {"0": "none"},
    ),
}  # fmt: skip


def flowed(construct: Construct) -> tuple[float, float]:
    """How far the law moved along the flow, and how far the weights did, relative to the squared weights."""
    torch.manual_seed(0)
    model = construct.model().double()
    x = torch.randn(4, *construct.shape, dtype=torch.float64)
    y = torch.randn(4, dtype=torch.float64)
    found = {group.producers[0].layer: group.law for group in trace(model, x).groups}
    assert construct.claimed.items() <= found.items(), found

    def loss(model: nn.Module) -> Tensor:
        return (model(x).flatten(1).mean(1) - y).square().mean()  # type: ignore[no-any-return]

    def weights(model: nn.Module) -> Weights:
        return {name: p.detach() for name, p in model.named_parameters()}

    def everything(model: nn.Module) -> Tensor:
        return torch.cat([p.flatten() for p in weights(model).values()])

    quantities = {"law": lambda m: construct.law(weights(m)), "all": everything}
    course = gradient_flow(model, loss, 0.02, at=2, quantities=quantities, method="RK45", rtol=1e-8, atol=1e-11)
    scale = float((course.values["all"][0] ** 2).sum())
    law, all_ = (np.abs(course.values[name] - course.values[name][0]) for name in ("law", "all"))
    assert course.slides == 0
    return float(law.max()) / scale, float(np.sqrt((all_[-1] ** 2).sum() / scale))


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_law_of_each_construct_is_conserved_by_gradient_flow(name: str) -> None:
    law, moved = flowed(CONSTRUCTS[name])
    assert law < 1e-8
    assert moved > 1e-4


@pytest.mark.parametrize("name", BROKEN)
def test_where_no_law_is_claimed_the_number_moves(name: str) -> None:
    law, moved = flowed(BROKEN[name])
    assert law > 1e-6
    assert moved > 1e-4
