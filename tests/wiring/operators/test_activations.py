"""Largest slopes of activations against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from excite.wiring.operators import OPERATORS
from excite.wiring.operators.activations import Slope

SLOPES = {name: row.lipschitz.value for name, row in OPERATORS.items() if isinstance(row.lipschitz, Slope)}


@pytest.mark.parametrize("name", [n for n in SLOPES if not n.startswith(("clamp", "clip"))])
def test_slopes_are_upper_bounds_and_tight(name: str) -> None:
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    function = getattr(torch.ops.aten, name)
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    steepest = float(slope.abs().max())
    assert steepest <= SLOPES[name] + 1e-12
    assert SLOPES[name] <= steepest * 1.001
    if name == "gelu":
        (slope,) = torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)
        assert float(slope.abs().max()) <= SLOPES[name]


def call(name: str, x: torch.Tensor) -> torch.Tensor:
    settings = {"prelu": (torch.tensor([0.3]).double(),), "threshold": (0.5, 0.5), "clamp": (0.0,), "clip": (0.0,),
                "clamp_min": (0.0,), "clamp_max": (0.0,)}  # fmt: skip
    return getattr(torch.ops.aten, name)(x, *settings.get(name, ()))


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.activation and name != "rrelu"])
def test_conservation_says_whether_it_is_positively_homogeneous(name: str) -> None:
    x = torch.linspace(-9, 9, 41, dtype=torch.float64)
    homogeneous = torch.allclose(call(name, 3 * x), 3 * call(name, x))
    assert OPERATORS[name].conservation == ("channel" if homogeneous else "none")


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "abs", "hardtanh", "hardsigmoid", "threshold", "softshrink"])
def test_kinks_are_where_the_slope_changes(name: str) -> None:
    activation = OPERATORS[name].activation
    assert activation is not None
    kinks = activation.kinks(*((0.5, 0.5) if name == "threshold" else ()))
    x = torch.linspace(-4, 4, 801, dtype=torch.float64)
    bend = call(name, x).diff(n=2).abs() > 1e-9
    places = x[1:-1][bend]
    assert all(min(abs(float(place) - kink) for kink in kinks) <= 0.011 for place in places)
    assert all(float((places - kink).abs().min()) <= 0.011 for kink in kinks)
