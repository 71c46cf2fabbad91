"""One shared table of small models: it drives the tests of wiring, excitation and margins.

`build(name)` returns a model in float64 with fixed weights and an example batch of four. Each model has one scalar
output unless `outputs` says otherwise; `pick` is what `output=` needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    "groupnorm": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1)), IMAGE
    ),
    "weight-norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 1)), (5,)
    ),
    "transformer": Case(Transformer, (3, 8), layers=9),
    "transformer-dropout": Case(lambda: Transformer(0.2), (3, 8), layers=9),
    "transformer-time-first": Case(lambda: Transformer(batch_first=False), (3, 8), layers=9),
    "gated": Case(Gated, (5,), layers=4),
    "tokens": Case(Tokens, (4,), tokens=True),
    "dict": Case(ReturnsDict, (5,), pick="logits", layers=3),
    "tuple": Case(ReturnsTuple, (5,), pick=0, layers=3),
}  # fmt: skip


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
