"""Which units are active is read at the input of their activation, whoever calls it and whatever stands before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.probes.base import StepContext
from models import CASES, build

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "nn.ReLU": (nn.ReLU(), lambda z: z > 0),
    "nn.ReLU in place": (nn.ReLU(inplace=True), lambda z: z > 0),
    "F.relu": (F.relu, lambda z: z > 0),
    "torch.relu": (torch.relu, lambda z: z > 0),
    "torch.relu_": (lambda z: torch.relu_(z), lambda z: z > 0),
    "method": (lambda z: z.relu(), lambda z: z > 0),
    "leaky": (nn.LeakyReLU(0.1), lambda z: z > 0),
    "prelu": (nn.PReLU().double(), lambda z: z > 0),
    "relu6": (nn.ReLU6(), lambda z: z > 0),
    "F.relu6": (F.relu6, lambda z: z > 0),
    "hardtanh": (nn.Hardtanh(-0.2, 0.3), lambda z: z > -0.2),
    "threshold": (nn.Threshold(0.3, 0.0), lambda z: z > 0.3),
    "clamp": (lambda z: z.clamp(min=0), lambda z: z > 0),
    "clamp_min": (lambda z: torch.clamp_min(z, 0.25), lambda z: z > 0.25),
    "clamp positional": (lambda z: torch.clamp(z, 0.25), lambda z: z > 0.25),
    "clamp in place": (lambda z: z.clamp_(min=0), lambda z: z > 0),
    "clamp from above": (lambda z: z.clamp(max=1), lambda z: z > 0),
    "maximum": (lambda z: torch.maximum(z, torch.zeros_like(z)), lambda z: z > 0),
    "maximum of a number": (lambda z: torch.maximum(z, torch.zeros((), dtype=z.dtype)), lambda z: z > 0),
    "abs": (torch.abs, lambda z: z > 0),
    "where": (lambda z: torch.where(z > 0, z, 0.1 * z), lambda z: z > 0),
    "mask": (lambda z: z * (z > 0), lambda z: z > 0),
    "gelu": (F.gelu, lambda z: z > 0),
    "silu": (nn.SiLU(), lambda z: z > 0),
    "tanh": (torch.tanh, lambda z: z > 0),
}  # fmt: skip


class Between(nn.Module):
    """An affine layer, something in between, an activation, an output layer."""

    def __init__(self, between: Callable[[nn.Module, Tensor, Tensor], Tensor], activation: Callable[[Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 1)
        self.other = nn.Linear(5, 6)
        self.norm, self.layer = nn.BatchNorm1d(6), nn.LayerNorm(6)
        for norm in (self.norm, self.layer):  # not centred: signs differ from those of the affine output
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.shift = nn.Parameter(torch.randn(6))
        self.between, self.activation = between, activation
        self.entered: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        z = self.between(self, self.first(x), x)
        self.entered = z.detach().clone()
        h = self.activation(z)
        return self.last(h.reshape(len(x), 6) if h.numel() == 6 * len(x) else h.reshape(len(x), -1)[:, :6])


BETWEEN: dict[str, Callable[[Between, Tensor, Tensor], Tensor]] = {
    "nothing": lambda m, z, x: z,
    "batch normalization": lambda m, z, x: m.norm(z),
    "layer normalization": lambda m, z, x: m.layer(z),
    "a residual sum": lambda m, z, x: z + m.other(x),
    "a residual sum in place": lambda m, z, x: z.add_(m.other(x)),
    "a bias": lambda m, z, x: z + m.shift,
    "a scale": lambda m, z, x: m.shift * z,
    "dropout": lambda m, z, x: F.dropout(z, 0.5, m.training),
    "all of it": lambda m, z, x: F.dropout(m.norm(z) + m.other(x), 0.5, m.training) * 2,
}


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(9, 5, dtype=torch.float64)


def active(model: nn.Module, x: Tensor, layer: str = "first") -> Tensor:
    return next(one for one in StepContext(model, 0, example=x).signals if one.layer == layer).active


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_spelling_of_an_activation_is_seen(name: str) -> None:
    activation, expected = ACTIVATIONS[name]
    model, x = Between(BETWEEN["batch normalization"], activation).double(), example()
    found = active(model, x)
    assert torch.equal(found, expected(model.entered))


@pytest.mark.parametrize("name", BETWEEN)
def test_whatever_stands_between(name: str) -> None:
    model, x = Between(BETWEEN[name], F.relu).double(), example()
    found = active(model, x)
    assert torch.equal(found, model.entered > 0)
    if "residual" in name:  # both layers meet at the same activation
        assert torch.equal(active(model, x, "other"), found)
    assert active(model, x, "last").shape == (9, 1)


MOVES: dict[str, tuple[Callable[[Between, Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "turned": (lambda m, z, x: m.norm(z).T, lambda e: e.T > 0),
    "reshaped": (lambda m, z, x: m.norm(z).view(-1, 2, 3), lambda e: e.reshape(-1, 6) > 0),
    "flattened and rolled": (lambda m, z, x: m.norm(z).roll(1, 1), lambda e: e.roll(-1, 1) > 0),
    "beside others": (lambda m, z, x: torch.cat([m.other(x), m.norm(z)], 1), lambda e: e[:, 6:] > 0),
    "stacked": (lambda m, z, x: torch.stack([m.norm(z), m.other(x)], 1), lambda e: e[:, 0] > 0),
    "turned around by an index": (lambda m, z, x: m.norm(z)[:, torch.tensor([5, 4, 3, 2, 1, 0])], lambda e: e.flip(1) > 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_elements_are_followed_where_they_move(name: str) -> None:
    move, expected = MOVES[name]
    model, x = Between(move, F.relu).double(), example()
    found = active(model, x)
    assert torch.equal(found, expected(model.entered))


def test_halves_with_activations_of_their_own() -> None:
    """Elements that reach no activation are judged by the affine output itself."""

    def gated(m: Between, z: Tensor, x: Tensor) -> Tensor:
        left, right = m.norm(z).chunk(2, 1)
        return torch.cat([F.relu(left), right], 1)

    model, x = Between(gated, nn.Identity()).double(), example()
    found = active(model, x)
    with torch.no_grad():
        z = model.first(x)
        normalized = F.batch_norm(z, None, None, model.norm.weight, model.norm.bias, training=True)
    assert torch.equal(found[:, :3], normalized[:, :3] > 0)
    assert torch.equal(found[:, 3:], z[:, 3:] > 0)


def test_maxima_and_means_before_the_activation() -> None:
    """max(z)_+ is max((z)_+), so that units are judged before a max-pooling; before a mean that is an approximation."""
    torch.manual_seed(0)
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    for pool, note in ((nn.MaxPool2d(2), ""), (nn.AvgPool2d(2), "avg_pool2d")):
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), pool, nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)
        ).double()
        nn.init.normal_(model[1].bias)
        found = active(model, x, "0")
        with torch.no_grad():
            z = F.batch_norm(model[0](x), None, None, model[1].weight, model[1].bias, training=True)
        assert torch.equal(found, z.movedim(1, -1).reshape(-1, 3) > 0)
        from excite.probes import richness

        assert note in richness(model, x, units=True)["0"].units_note


def test_an_activation_later_in_a_stream_does_not_count() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            stream = self.first(x)
            stream = stream + self.second(F.relu(stream + 1))
            return self.last(F.relu(stream - 2))

    torch.manual_seed(0)
    model, x = Stream().double(), example()
    with torch.no_grad():
        first = model.first(x)
        second = first + model.second(F.relu(first + 1))
    assert torch.equal(active(model, x), first + 1 > 0)
    assert torch.equal(active(model, x, "second"), second - 2 > 0)


@pytest.mark.parametrize("name", CASES)
def test_every_layer_of_every_model_has_units(name: str) -> None:
    model, x = build(name, batch=6)
    for signal in StepContext(model, 0, example=x).signals:
        if "transpose" not in signal.call.function.__name__:
            output = signal.call.run(signal.input)
            assert signal.positive.shape == output.shape
            assert signal.active.numel() == output.numel()
            units = output.shape[1] if signal.call.kind == "conv" else output.shape[-1] if output.dim() > 1 else 1
            assert signal.active.shape[1] == units  # h @ v has one unit and no axis for it
