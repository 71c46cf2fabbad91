"""Lines around activations: below and above at every point of the interval."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from excite.margin.certificates.relaxations import ACTIVATIONS, interval, lines

FUNCTIONS = {
    "relu": F.relu, "leaky_relu": F.leaky_relu, "abs": torch.abs, "hardtanh": F.hardtanh, "hardsigmoid": F.hardsigmoid,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus, "elu": F.elu,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lines_hold_the_activation(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = 12 * torch.rand(400, 2, generator=generator, dtype=torch.float64) ** 3 * torch.tensor([-1.0, 1.0])
    ends = ends + torch.randn(400, 1, generator=generator, dtype=torch.float64)
    low, high = ends[:, 0], ends[:, 1]
    g, activation = FUNCTIONS[name], ACTIVATIONS[name]
    around, (least, most) = lines(activation, g, (), low, high), interval(activation, g, (), low, high)
    for part in torch.linspace(0, 1, 301, dtype=torch.float64):
        t = low + part * (high - low)
        value = g(t)
        assert (around.below_slope * t + around.below <= value + 1e-12).all()
        assert (around.above_slope * t + around.above >= value - 1e-12).all()
        assert (least <= value + 1e-12).all()
        assert (most >= value - 1e-12).all()


def test_relu_has_the_lines_of_crown() -> None:
    low, high = torch.tensor([-1.0, -3.0, 1.0, -2.0]).double(), torch.tensor([3.0, 1.0, 2.0, -1.0]).double()
    around = lines(ACTIVATIONS["relu"], F.relu, (), low, high)
    torch.testing.assert_close(around.below_slope, torch.tensor([1.0, 0.0, 1.0, 0.0]).double())
    torch.testing.assert_close(around.above_slope, torch.tensor([0.75, 0.25, 1.0, 0.0]).double())
    torch.testing.assert_close(around.above, torch.tensor([0.75, 0.75, 0.0, 0.0]).double())


def test_every_activation_is_tested() -> None:
    assert set(ACTIVATIONS) - set(FUNCTIONS) == {"clamp", "clamp_min", "clamp_max"}
