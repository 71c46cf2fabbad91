"""Each side of a kink has a smooth continuation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.train.dynamics.kinks import Kinks, sides


@pytest.mark.parametrize("name", sorted({
    "relu", "relu_", "leaky_relu", "prelu", "abs", "threshold", "hardtanh", "relu6", "clamp", "clamp_min", "clamp_max",
    "maximum", "minimum", "max_pool1d", "max_pool2d", "max_pool3d", "F.relu in place", "nn.LeakyReLU"}))  # fmt: skip
def test_a_side_is_continued_beyond_its_kink(name: str) -> None:
    """On its own side a function is itself, and so is its gradient; from there on it is linear in its argument."""
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu, "relu_": lambda z: (1 * z).relu_(), "leaky_relu": lambda z: F.leaky_relu(z, 0.1),
        "prelu": lambda z: F.prelu(z, torch.tensor([0.2]).double()), "abs": lambda z: z.abs(),
        "threshold": lambda z: F.threshold(z, 0.2, -1.0), "hardtanh": lambda z: F.hardtanh(z, -0.5, 0.7),
        "relu6": lambda z: F.relu6(4 * z), "clamp": lambda z: z.clamp(-0.5, 0.7), "clamp_min": lambda z: z.clamp_min(0.1),
        "clamp_max": lambda z: z.clamp_max(0.1), "maximum": lambda z: torch.maximum(z, z.flip(1)),
        "minimum": lambda z: torch.minimum(z, z.flip(1)), "max_pool1d": lambda z: F.max_pool1d(z[None], 2),
        "max_pool2d": lambda z: F.max_pool2d(z[None, None], 2, stride=1),
        "max_pool3d": lambda z: F.max_pool3d(z.view(1, 1, 2, 2, 4), 2, stride=1),
        "F.relu in place": lambda z: F.relu(1 * z, inplace=True), "nn.LeakyReLU": nn.LeakyReLU(0.3, inplace=False),
    }  # fmt: skip
    function = calls[name]
    here, there = 2 * torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    here, there = here.requires_grad_(), there.requires_grad_()
    with Kinks() as seen:
        value = function(here)
    assert seen.values
    torch.testing.assert_close(value, function(here))
    side = [sides(one.detach(), None) for one in seen.values]

    def on(z: Tensor) -> Tensor:
        with Kinks(side):
            return function(z)

    torch.testing.assert_close(on(here), function(here))
    slopes = [torch.autograd.grad(use(here).sum(), here)[0] for use in (on, function)]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(on((here + there) / 2), (on(here) + on(there)) / 2)  # linear, also beyond the kink
    assert not torch.allclose(on(there), function(there))
