"""One shared table of small models: it drives the tests of wiring, excitation and margins.

`build(name)` returns a model in float64 with fixed weights and an example batch of four. Each model has one scalar
output unless `outputs` says otherwise; `pick` is what `output=` needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Functional(nn.Module):
    """Parameters held by hand, bare functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(7, 5) / 2)
        self.first_bias = nn.Parameter(torch.randn(7) / 4)
        self.second = nn.Parameter(torch.randn(1, 7) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.first, self.first_bias)), self.second)


class Products(nn.Module):
    """Affine maps written with @."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 6) / 2)
        self.bias = nn.Parameter(torch.randn(6) / 4)
        self.second = nn.Parameter(torch.randn(1, 6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x @ self.first + self.bias, 0.1) @ self.second.T


class Block(nn.Module):
    """A residual block; the skip is the identity, a diagonal scaling or a free 1x1 convolution."""

    def __init__(self, channels: int, skip: str, norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.bn1 = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.bn2 = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.skip: nn.Module | None = None
        self.scale: nn.Parameter | None = None
        if skip == "free":
            self.skip = nn.Conv2d(channels, channels, 1)
        elif skip == "diagonal":
            self.scale = nn.Parameter(torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        skip = x
        if self.skip is not None:
            skip = self.skip(x)
        elif self.scale is not None:
            skip = x * self.scale[:, None, None]
        return F.relu(out + skip)


class ResNet(nn.Module):
    def __init__(self, skip: str, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.block1 = Block(4, skip, norm)
        self.block2 = Block(4, skip, norm)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(F.relu(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Dense(nn.Module):
    """Concatenation as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 2, 3, padding=1)
        self.third = nn.Conv2d(5, 2, 3, padding=1)
        self.head = nn.Linear(7 * 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.first(x))
        b = F.relu(self.second(a))
        ab = torch.cat([a, b], 1)
        c = F.relu(self.third(ab))
        return self.head(torch.cat([ab, c], 1).flatten(1))


class Shared(nn.Module):
    """The same weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.again = nn.Linear(6, 6)
        self.leave = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.enter(x))
        x = F.relu(self.again(x))
        return self.leave(F.relu(self.again(x)))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=batch_first)
        self.batch_first = batch_first
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.batch_first:
            return self.head(self.encoder(x.transpose(0, 1)).mean(0))
        return self.head(self.encoder(x).mean(1))


class Residual(nn.Module):
    """Fully connected, with a residual sum between the affine layer and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.inner = nn.Linear(6, 6)
        self.leave = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.enter(x))
        return self.leave(F.relu(self.inner(x) + x))


class Heads(nn.Module):
    """Attention with projections of their own and without biases: each head is made by some rows of a weight."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        return self.head(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1))


class Halves(nn.Module):
    """One layer of which some channels take another way to the same reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).split(4, 1)
        return self.second(torch.cat([F.relu(a), F.leaky_relu(b, 0.1)], 1))


class Folded(nn.Module):
    """Time folded into the batch, sample by sample (B·T) or step by step (T·B): layers in between see one axis for both."""

    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.time_first = time_first
        self.enter = nn.Linear(4, 6)
        self.hidden = nn.Linear(6, 5)
        self.leave = nn.Linear(15, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time = x.shape[:2]
        rows = x.transpose(0, 1).reshape(time * batch, -1) if self.time_first else x.reshape(batch * time, -1)
        h = F.relu(self.hidden(F.relu(self.enter(rows))))
        h = h.view(time, batch, -1).transpose(0, 1) if self.time_first else h.view(batch, time, -1)
        return self.leave(h.reshape(batch, -1))


class Gated(nn.Module):
    """A product of two activations with a ReLU gate, then a square."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(5, 6), nn.Linear(5, 6)
        self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.down(F.relu(self.gate(x)) * self.up(x)))
        return self.head(h * h)


class Tokens(nn.Module):
    """Integer inputs: the embedding cannot be perturbed, what follows can."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.embed(x).mean(1))))


class ReturnsDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.head = nn.Linear(6, 1)
        self.side = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.body(x))
        return {"side": self.side(h), "logits": self.head(h)}


class ReturnsTuple(ReturnsDict):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        returned = super().forward(x)
        return returned["logits"], returned["side"]


class Written(nn.Module):
    """A hidden layer and an output of one number, written in other ways than with modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 6) / 2)
        self.bias = nn.Parameter(torch.randn(6) / 4)
        self.gain = nn.Parameter(torch.rand(7) + 0.5)
        self.second = nn.Parameter(torch.randn(7, 6) / 2)
        self.last = nn.Parameter(torch.randn(7) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(x @ (2 * self.first).to(x.dtype) + self.bias)
        h = F.relu(torch.einsum("bi,oi->bo", [h, self.second]) * self.gain)
        return h @ self.last


class Recurrent(nn.Module):
    """A recurrent layer by hand, from a state of zeros; x (batch, time, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Parameter(torch.randn(3, 4) / 2)
        self.again = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4) / 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 4, dtype=x.dtype, device=x.device)
        for step in x.unbind(1):
            state = torch.tanh(step @ self.enter + state @ self.again + self.bias)
        return self.head(state)


class InPlace(nn.Module):
    """Layers that are written with operations in place, and a division."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 4) / 2)
        self.second = nn.Parameter(torch.rand(3, 4) + 0.5)
        self.last = nn.Parameter(torch.randn(3) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 4, dtype=x.dtype, device=x.device).addmm_(x, self.first)
        h = torch.tanh((torch.tanh(h)[:, None] / self.second).sum(-1)).clone()
        h *= self.last
        return h.sum(-1)


def padded_network(mode: str, axes: int = 2, outputs: int = 1) -> nn.Sequential:
    """Two convolutions whose padding is not zero, on signals of 4 entries along each axis."""
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
    return nn.Sequential(
        conv(2, 3, 3, padding=1, padding_mode=mode), nn.LeakyReLU(0.1),
        conv(3, 2, 3, padding=1, stride=2, padding_mode=mode), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(2 ** (axes + 1), outputs),
    )  # fmt: skip


class Patches(nn.Module):
    """A convolution written by hand: patches of a padded image times a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(3, 2, 3, 3) / 3)
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(F.pad(x, (1, 1, 1, 1), mode="circular"), 3)
        return self.head(F.relu(patches.transpose(1, 2) @ self.filters.flatten(1).T).transpose(1, 2).flatten(1))


def papers_network(outputs: int = 1) -> nn.Sequential:
    """The network of the papers' planes and horses."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 5), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 32, 5), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 240), nn.LeakyReLU(), nn.Linear(240, 192), nn.LeakyReLU(), nn.Linear(192, outputs),
    )  # fmt: skip


def _convolutional(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1), nn.LeakyReLU(0.1),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, outputs),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outputs: int = 1
    pick: str | int | None = None
    tokens: bool = False
    layers: int = 2  # affine calls in one forward


IMAGE = (2, 6, 6)
CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(5, 1), (5,), layers=1),
    "linear-classes": Case(lambda: nn.Linear(5, 3), (5,), outputs=3, layers=1),
    "mlp": Case(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.LeakyReLU(0.1), nn.Linear(6, 1)), (5,), layers=3),
    "deep-linear": Case(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 1)), (5,), layers=3),
    "tanh": Case(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)), (5,)),
    "functional": Case(Functional, (5,)),
    "products": Case(Products, (5,)),
    "written": Case(Written, (5,), layers=3),
    "recurrent": Case(Recurrent, (2, 3), layers=5),
    "in-place": Case(InPlace, (5,), layers=3),
    "padding-circular": Case(lambda: padded_network("circular"), (2, 4, 4), layers=3),
    "padding-reflect": Case(lambda: padded_network("reflect"), (2, 4, 4), layers=3),
    "patches": Case(Patches, (2, 4, 4)),
    "convolutional": Case(_convolutional, (2, 4, 4), layers=4),
    "convolutional-classes": Case(lambda: _convolutional(4), (2, 4, 4), outputs=4, layers=4),
    "papers": Case(papers_network, (3, 32, 32), layers=5),
    "resnet-identity": Case(lambda: ResNet("identity"), IMAGE, layers=6),
    "resnet-diagonal": Case(lambda: ResNet("diagonal"), IMAGE, layers=6),
    "resnet-free": Case(lambda: ResNet("free"), IMAGE, layers=8),
    "resnet-norm": Case(lambda: ResNet("identity", norm=True), IMAGE, layers=6),
    "dense": Case(Dense, (2, 3, 3), layers=4),
    "grouped": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1)
        ),
        IMAGE,
        layers=3,
    ),
    "depthwise": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Flatten(), nn.Linear(48, 1)
        ),
        IMAGE,
        layers=4,
    ),
    "transposed": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 1)),
        IMAGE,
        layers=3,
    ),
    "conv1d": Case(lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 1)), (2, 8)),
    "shared": Case(Shared, (5,), layers=4),
    "dropout": Case(lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 1)), (5,)),
    "layernorm": Case(lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)), (5,)),
    "batchnorm": Case(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)), (5,)),
    "batchnorm-conv": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)), IMAGE
    ),
    "instancenorm": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)
        ),
        IMAGE,
    ),
    "groupnorm": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)), IMAGE
    ),
    "weight-norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 1)), (5,)
    ),
    "transformer": Case(Transformer, (3, 8), layers=9),
    "transformer-dropout": Case(lambda: Transformer(0.2), (3, 8), layers=9),
    "transformer-time-first": Case(lambda: Transformer(batch_first=False), (3, 8), layers=9),
    "residual": Case(Residual, (5,), layers=3),
    "heads": Case(Heads, (3, 8), layers=5),
    "halves": Case(Halves, (5,)),
    "folded": Case(Folded, (3, 4), layers=3),
    "folded-time-first": Case(lambda: Folded(time_first=True), (3, 4), layers=3),
    "gated": Case(Gated, (5,), layers=4),
    "tokens": Case(Tokens, (4,), tokens=True),
    "dict": Case(ReturnsDict, (5,), pick="logits", layers=3),
    "tuple": Case(ReturnsTuple, (5,), pick=0, layers=3),
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to write z = W x: `shapes` of the parameters, z of them and x, and W (outputs, inputs) of them.

    `layer` is the name that the call must have.
    """

    shapes: dict[str, tuple[int, ...]]
    apply: Callable[[Any, Tensor], Tensor]
    matrix: Callable[[Any], Tensor]
    layer: str = "w"
    in_shape: tuple[int, ...] = (5,)


class ByHand(nn.Module):
    """The first layer in one of the `WAYS`, then a linear layer."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        for name, shape in way.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))
        self.register_buffer("mask", (torch.arange(30) % 3 > 0).reshape(6, 5).float())
        self.constant = torch.tensor(1.5)
        with torch.no_grad():
            outputs = way.apply(self, torch.randn(2, 5)).reshape(2, -1).shape[1]
        self.head = nn.Linear(outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.way.apply(self, x)).reshape(len(x), -1))


class AsLinear(nn.Module):
    """The same network with F.linear and the weight itself."""

    def __init__(self, other: ByHand) -> None:
        super().__init__()
        self.w = nn.Parameter(other.way.matrix(other).detach().clone())
        self.head = other.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(x, self.w)))


def _filled(x: Tensor, w: Tensor) -> Tensor:
    weight = torch.empty_like(w)
    weight[:3] = w[:3] * 2
    weight[3:].copy_(w[3:])
    return x @ weight.T


def _scaled_in_place(x: Tensor, w: Tensor) -> Tensor:
    scaled = x + 0
    scaled *= w
    return scaled


_W, _V, _WT = {"w": (6, 5)}, {"w": (5,)}, {"w": (5, 6)}
WAYS: dict[str, Way] = {
    "F.linear": Way(_W, lambda m, x: F.linear(x, m.w), lambda m: m.w),
    "F.linear by name": Way(_W, lambda m, x: F.linear(input=x, weight=m.w), lambda m: m.w),
    "x @ W": Way(_WT, lambda m, x: x @ m.w, lambda m: m.w.T),
    "x @ W.T": Way(_W, lambda m, x: x @ m.w.T, lambda m: m.w),
    "W @ x": Way(_W, lambda m, x: (m.w @ x.T).T, lambda m: m.w, in_shape=(5,)),
    "matmul by name": Way(_WT, lambda m, x: torch.matmul(input=x, other=m.w), lambda m: m.w.T),
    "matmul, the other by name": Way(_WT, lambda m, x: x.matmul(other=m.w), lambda m: m.w.T),
    "linalg.matmul": Way(_WT, lambda m, x: torch.linalg.matmul(x, m.w), lambda m: m.w.T),
    "mm": Way(_WT, lambda m, x: torch.mm(x, m.w), lambda m: m.w.T),
    "bmm": Way(_WT, lambda m, x: torch.bmm(x[None], m.w[None])[0], lambda m: m.w.T, in_shape=(1, 5)),
    "h @ v": Way(_V, lambda m, x: x @ m.w, lambda m: m.w[None]),
    "mv": Way(_V, lambda m, x: torch.mv(x, m.w), lambda m: m.w[None]),
    "x.mv": Way(_V, lambda m, x: x.mv(vec=m.w), lambda m: m.w[None]),
    "inner": Way(_W, lambda m, x: torch.inner(x, m.w), lambda m: m.w),
    "inner, W first": Way(_W, lambda m, x: torch.inner(m.w, x).T, lambda m: m.w),
    "vecdot": Way(_V, lambda m, x: torch.linalg.vecdot(x, m.w), lambda m: m.w[None]),
    "tensordot": Way(_W, lambda m, x: torch.tensordot(x, m.w, dims=([1], [1])), lambda m: m.w),
    "tensordot over one axis": Way(_WT, lambda m, x: torch.tensordot(x, m.w, 1), lambda m: m.w.T),
    "addmm": Way(_WT, lambda m, x: torch.addmm(torch.zeros(6, dtype=x.dtype), x, m.w), lambda m: m.w.T),
    "addmm to zeros": Way(
        _WT, lambda m, x: torch.addmm(torch.zeros(len(x), 6, dtype=x.dtype), x, m.w), lambda m: m.w.T
    ),
    "addmm, scaled": Way(
        _WT, lambda m, x: torch.addmm(torch.ones(6, dtype=x.dtype), x, m.w, beta=0, alpha=3), lambda m: 3 * m.w.T
    ),
    "addmv": Way(_V, lambda m, x: torch.addmv(torch.zeros(1, dtype=x.dtype), x, m.w), lambda m: m.w[None]),
    "baddbmm": Way(
        _WT,
        lambda m, x: torch.baddbmm(torch.zeros(1, 1, 1, dtype=x.dtype), x[None], m.w[None])[0],
        lambda m: m.w.T,
        in_shape=(1, 5),
    ),
    "addbmm": Way(
        _WT,
        lambda m, x: torch.addbmm(torch.zeros(1, dtype=x.dtype), x[None], m.w[None]),
        lambda m: m.w.T,
        in_shape=(1, 5),
    ),
    "einsum": Way(_W, lambda m, x: torch.einsum("bi,oi->bo", x, m.w), lambda m: m.w),
    "einsum of a list": Way(_W, lambda m, x: torch.einsum("...i,oi", [x, m.w]), lambda m: m.w),
    "einsum by numbers": Way(_W, lambda m, x: torch.einsum(x, [0, 1], m.w, [2, 1], [0, 2]), lambda m: m.w),
    "einsum of three": Way(
        {"w": (4, 5), "u": (6, 4)}, lambda m, x: torch.einsum("bi,ki,ok->bo", x, m.w, m.u), lambda m: m.u @ m.w
    ),
    "multi_dot": Way(
        {"w": (5, 4), "u": (4, 6)}, lambda m, x: torch.linalg.multi_dot([x, m.w, m.u]), lambda m: (m.w @ m.u).T
    ),
    "bilinear with a learned input": Way(
        {"w": (6, 5, 3), "u": (3,)},
        lambda m, x: F.bilinear(x, m.u.expand(len(x), 3), m.w),
        lambda m: m.w @ m.u,
    ),
    "(x · v).sum": Way(_V, lambda m, x: (x * m.w).sum(-1), lambda m: m.w[None]),
    "(v · x).mean": Way(_V, lambda m, x: torch.mean(torch.mul(m.w, x), 1), lambda m: m.w[None] / 5),
    "(x · W).sum": Way(_W, lambda m, x: (x[:, None] * m.w).sum(dim=-1), lambda m: m.w, in_shape=(1, 5)),
    "x.mul_(v).sum": Way(_V, lambda m, x: x.clone().mul_(m.w).sum(-1), lambda m: m.w[None]),
    "x *= v, sum": Way(_V, lambda m, x: _scaled_in_place(x, m.w).sum(-1), lambda m: m.w[None]),
    "(x / v).sum": Way(_V, lambda m, x: (x / m.w).sum(-1), lambda m: 1 / m.w[None]),
    "(x / W).mean": Way(_W, lambda m, x: torch.div(x[:, None], m.w).mean(-1), lambda m: 0.2 / m.w, in_shape=(1, 5)),
    "x.div_(v).sum": Way(_V, lambda m, x: x.clone().div_(m.w).sum(-1), lambda m: 1 / m.w[None]),
    "addmm_": Way(_WT, lambda m, x: x.new_zeros(len(x), 6).addmm_(x, m.w), lambda m: m.w.T),
    "addmm_, scaled": Way(
        _WT,
        lambda m, x: torch.ones(len(x), 6, dtype=x.dtype).addmm_(x, m.w, beta=0, alpha=3),
        lambda m: 3 * m.w.T,
    ),
    "addmv_": Way(_V, lambda m, x: x.new_zeros(len(x)).addmv_(x, m.w), lambda m: m.w[None]),
    "baddbmm_": Way(
        _WT,
        lambda m, x: x.new_zeros(1, len(x), 6).baddbmm_(x[None], m.w[None])[0],
        lambda m: m.w.T,
        in_shape=(1, 5),
    ),
    "x @ (W + 0 · x)": Way(_WT, lambda m, x: x @ (m.w + 0 * x.mean()), lambda m: m.w.T),
    "a 1×1 convolution": Way(
        _W, lambda m, x: F.conv1d(x[..., None], m.w[..., None])[..., 0], lambda m: m.w, in_shape=(5, 1)
    ),
    "W · c": Way(_W, lambda m, x: F.linear(x, m.w * 0.5), lambda m: m.w * 0.5),
    "x @ (W · c)": Way(_WT, lambda m, x: x @ (m.w * 0.5), lambda m: m.w.T * 0.5),
    "x @ (W · constant)": Way(_WT, lambda m, x: x @ (m.constant * m.w), lambda m: m.w.T * 1.5),
    "x @ (W · mask)": Way(_W, lambda m, x: x @ (m.mask * m.w).T, lambda m: m.w * m.mask),
    "x @ W.to": Way(_WT, lambda m, x: x @ m.w.float().to(x), lambda m: m.w.float().T.to(m.w)),
    "x @ W.clone().detach()": Way(_WT, lambda m, x: x @ m.w.clone().detach(), lambda m: m.w.T),
    "x @ (W / ‖W‖)": Way(_WT, lambda m, x: x @ F.normalize(m.w, dim=0), lambda m: F.normalize(m.w, dim=0).T),
    "x @ (g · W / ‖W‖)": Way(
        {"w": (6, 5), "g": (6, 1)}, lambda m, x: x @ (m.g * F.normalize(m.w)).T, lambda m: m.g * F.normalize(m.w)
    ),
    "x @ (W + B A)": Way(
        {"w": (6, 5), "b": (6, 2), "a": (2, 5)}, lambda m, x: x @ (m.w + m.b @ m.a).T, lambda m: m.w + m.b @ m.a
    ),
    "x @ orthogonal": Way(
        {"w": (5, 5)}, lambda m, x: x @ torch.matrix_exp(m.w - m.w.T), lambda m: torch.matrix_exp(m.w - m.w.T).T
    ),
    "x @ stack": Way(
        {"w": (5,), "u": (5,)}, lambda m, x: x @ torch.stack([m.w, m.u], 1), lambda m: torch.stack([m.w, m.u])
    ),
    "row by row": Way({"w": (1, 5)}, lambda m, x: sum(x @ row for row in m.w), lambda m: m.w),
    "written into memory": Way(_W, lambda m, x: _filled(x, m.w), lambda m: torch.cat([m.w[:3] * 2, m.w[3:]])),
}


def build_way(name: str, batch: int = 4) -> tuple[ByHand, AsLinear, Tensor]:
    """The network, the same one with F.linear, and a batch, in float64."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = ByHand(WAYS[name]).double()
    model.constant = model.constant.double()
    x = torch.randn(batch, 5, dtype=torch.float64)
    torch.set_rng_state(state)
    return model, AsLinear(model), x


def build(name: str, batch: int = 4, seed: int = 0) -> tuple[nn.Module, Tensor]:
    case = CASES[name]
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = case.make().double()
    x = torch.randint(11, (batch, *case.shape)) if case.tokens else torch.randn(batch, *case.shape, dtype=torch.float64)
    torch.set_rng_state(state)
    return model, x


def with_outputs(model: nn.Module, outputs: int, seed: int = 1) -> nn.Module:
    """The model with another number of outputs: its last linear layer replaced."""
    name, last = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model.set_submodule(name, nn.Linear(last.in_features, outputs).to(last.weight))
    torch.set_rng_state(state)
    return model


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything that must not change: parameters, gradients, buffers, modes, hooks and the random state."""
    return {
        "tensors": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def same_state(before: object, after: object) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(same_state(before[k], after[k]) for k in before)
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return torch.equal(before, after)
    return before == after


FAMILIES = ("gpt2", "llama", "qwen3", "bert", "vit")


def transformer(family: str, kernel: str = "sdpa", layers: int = 1) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model of a family of transformers' in float64, without dropout, and an example; `output="logits"` picks its output.

    Four query heads of four channels; llama and qwen3 have two key heads. `kernel` is the form of attention: "sdpa" or "eager".
    """
    import transformers as tf

    torch.manual_seed(0)
    tokens = {"input_ids": torch.randint(0, 31, (2, 5))}
    common = {"attn_implementation": kernel, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 4}
    text = {**common, "vocab_size": 31, "intermediate_size": 24, "max_position_embeddings": 16}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    grouped = {**text, "num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": False}
    model: nn.Module
    if family == "gpt2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = tf.GPT2Config(
            vocab_size=31, n_positions=16, n_embd=16, n_layer=layers, n_head=4, attn_implementation=kernel, use_cache=False, **drops
        )  # fmt: skip
        model = tf.GPT2LMHeadModel(config)
    elif family == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**grouped))
    elif family == "qwen3":
        model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**grouped, head_dim=4))
    elif family == "bert":
        model = tf.BertForSequenceClassification(tf.BertConfig(**text, **quiet))
    else:
        config = tf.ViTConfig(**common, **quiet, image_size=8, patch_size=4, num_channels=3, intermediate_size=24)
        model, tokens = tf.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 8, 8).double()}
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # theirs compute in float32, whatever the weights are
            module.forward = _rms_norm.__get__(module)  # type: ignore[method-assign]
    return model.double(), tokens


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))  # type: ignore[no-any-return]
