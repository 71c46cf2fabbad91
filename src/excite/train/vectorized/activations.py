"""Activations with their derivatives, each one operation that writes into memory that is there already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_aten = torch.ops.aten

# Names of the settings; out = ρ(z); out = g · ρ'(z), where h = ρ(z) is known.
_KNOWN: dict[type[nn.Module], tuple[tuple[str, ...], Callable[..., Any], Callable[..., Any]]] = {
    nn.ReLU: (
        (),
        lambda z, out: torch.clamp_min(z, 0, out=out),
        lambda g, z, h, out: _aten.threshold_backward.grad_input(g, z, 0, grad_input=out),
    ),
    nn.LeakyReLU: (
        ("negative_slope",),
        lambda z, out, slope: _aten.leaky_relu.out(z, slope, out=out),
        lambda g, z, h, out, slope: _aten.leaky_relu_backward.grad_input(g, z, slope, False, grad_input=out),
    ),
    nn.Tanh: (
        (),
        lambda z, out: torch.tanh(z, out=out),
        lambda g, z, h, out: _aten.tanh_backward.grad_input(g, h, grad_input=out),
    ),
    nn.Sigmoid: (
        (),
        lambda z, out: torch.sigmoid(z, out=out),
        lambda g, z, h, out: _aten.sigmoid_backward.grad_input(g, h, grad_input=out),
    ),
    nn.ELU: (
        ("alpha",),
        lambda z, out, alpha: _aten.elu.out(z, alpha, out=out),
        lambda g, z, h, out, alpha: _aten.elu_backward.grad_input(g, alpha, 1, 1, False, z, grad_input=out),
    ),
    nn.Softplus: (
        ("beta", "threshold"),
        lambda z, out, *settings: _aten.softplus.out(z, *settings, out=out),
        lambda g, z, h, out, *settings: _aten.softplus_backward.grad_input(g, z, *settings, grad_input=out),
    ),
    nn.SiLU: (
        (),
        lambda z, out: _aten.silu.out(z, out=out),
        lambda g, z, h, out: _aten.silu_backward.grad_input(g, z, grad_input=out),
    ),
    nn.GELU: (
        ("approximate",),
        lambda z, out, how: _aten.gelu.out(z, approximate=how, out=out),
        lambda g, z, h, out, how: _aten.gelu_backward.grad_input(g, z, approximate=how, grad_input=out),
    ),
}
NAMES = ", ".join(kind.__name__ for kind in _KNOWN)


@dataclass(frozen=True)
class Activation:
    """An elementwise function ρ."""

    kind: type[nn.Module]
    settings: tuple[Any, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Activation | None:
        """The activation that a module is, if it is one of `NAMES`."""
        module_type = type(module)
        return (
            cls(module_type, tuple(getattr(module, name) for name in _KNOWN[module_type][0]))
            if module_type in _KNOWN
            else None
        )

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(map(str, self.settings))})"

    def apply(self, z: Tensor, out: Tensor) -> None:
        """out = ρ(z)."""
        _KNOWN[self.kind][1](z, out, *self.settings)

    def pull(self, g: Tensor, z: Tensor, h: Tensor, out: Tensor) -> None:
        """out = g · ρ'(z), where h = ρ(z)."""
        _KNOWN[self.kind][2](g, z, h, out, *self.settings)
