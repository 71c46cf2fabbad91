"""How far each layer may be perturbed: one number, one per layer, relative to the layer's input, or growing in stages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from excite._core.checks import as_scalar, check_number, is_number, is_whole, shown
from excite.errors import InputError
from excite.excitation.radius_control import FitController


@dataclass(frozen=True)
class Relative:
    """A radius relative to each layer's input: `factor` times its root mean square over the batch (clean pass).

    For norms other than "inf" the same number is the radius of the ball in that norm.

    Args:
        factor: above 0.

    Raises:
        InputError: if the factor is not a number above 0.

    Example:
        >>> excite.PersistentExcitation(model, radius=excite.Relative(0.05))
    """

    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", _check_number(self.factor, "Relative"))
        if self.factor == 0:
            raise InputError(
                "Relative(0) would never perturb anything: give a factor above 0, or radius=0 for plain training"
            )


@dataclass(frozen=True)
class Stages:
    """A radius that grows in `n` equal stages of training: 0, r/(n−1), 2r/(n−1), …, r (n = 4 in the paper).

    `PersistentExcitation.advance(fraction)` moves from stage to stage.

    Args:
        radius: the last stage: a number, a dict by layer name or `Relative`.
        n: number of stages, at least 2.

    Raises:
        InputError: if no stage would perturb anything, or the radius is of another kind.

    Example:
        >>> pe = excite.PersistentExcitation(model, radius=excite.Stages(0.02))
        >>> pe.advance(0.5)  # half of training is done: radius 2 · 0.02 / 3
    """

    radius: float | Mapping[str, float] | Relative
    n: int = 4

    def __post_init__(self) -> None:
        if not is_whole(self.n) or self.n < 2:
            raise InputError(
                f"Stages(n={self.n!r}) would never perturb anything, since the first stage has radius 0: give a whole number of at least 2"
            )
        if isinstance(self.radius, Stages):
            raise InputError("Stages inside Stages: give a number, a dict by layer name or Relative")
        if isinstance(self.radius, str | FitController):
            raise InputError("radius 'auto' grows by itself: leave Stages out")
        object.__setattr__(self, "n", int(self.n))
        object.__setattr__(self, "radius", check_radius(self.radius))
        if not _perturbs(self.radius):
            raise InputError(
                "Stages of radius 0 would never perturb anything: give a radius above 0, or radius=0 for plain training"
            )

    def share(self, fraction: float) -> float:
        """The fraction of the full radius.

        Args:
            fraction: fraction of training that is done, 0 to 1.

        Returns:
            0, 1/(n−1), …, 1.
        """
        stage = min(int(fraction * self.n + 1e-9), self.n - 1)
        return stage / (self.n - 1)


Radius = float | Mapping[str, float] | Relative | Stages | FitController


def check_radius(radius: object) -> Radius:
    """The radius, refused if it is negative, not finite, of an unknown kind, or can never perturb (except a plain 0)."""
    if isinstance(radius, Relative | Stages | FitController):
        return radius
    if isinstance(radius, str) and radius == "auto":
        return FitController()
    if isinstance(radius, Mapping):
        for name in radius:
            if not isinstance(name, str):
                raise InputError(f"radius: expected layer names as keys; got {shown(name)}")
        radius = {name: _check_number(value, f"radius of layer {name!r}") for name, value in radius.items()}
        if not any(radius.values()):
            raise InputError(
                "radius: no layer has a radius above 0, so nothing would be perturbed: give radius=0 for plain training"
            )
        return radius
    if isinstance(radius, str):
        raise InputError(
            f"radius {radius!r}: expected 'auto', a number, a dict by layer name, excite.Relative or excite.Stages"
        )
    return _check_number(radius, "radius")


def _perturbs(radius: Radius) -> bool:
    return not isinstance(radius, int | float) or radius > 0


def _check_number(value: object, what: str) -> float:
    value = as_scalar(value)
    if not is_number(value):
        raise InputError(
            f"{what}: expected a number, a dict by layer name, excite.Relative or excite.Stages; got {shown(value)}"
        )
    return check_number(value, what, 0, 1e30)  # steps of several radii must not overflow float32


def base_radius(radius: Radius) -> float | Mapping[str, float] | Relative | FitController:
    """The final radius."""
    return radius.radius if isinstance(radius, Stages) else radius


def radius_names(radius: Radius) -> Iterable[str]:
    """Layer names that the radius mentions."""
    if isinstance(radius, Stages):
        return radius_names(radius.radius)
    return radius.keys() if isinstance(radius, Mapping) else ()


def radius_of(radius: Radius, layer: str, fraction: float) -> tuple[float | Tensor, bool]:
    """(number, whether it is relative to the layer's input) for one layer at `fraction` of training.

    A second call of a weight, `name#2`, has the radius of `name` unless the radius names it.
    """
    stage = 1.0
    if isinstance(radius, FitController):
        return radius.factor, True
    if isinstance(radius, Stages):
        stage, radius = radius.share(fraction), radius.radius
    if isinstance(radius, Relative):
        return stage * radius.factor, True
    if isinstance(radius, Mapping):
        return stage * radius.get(layer, radius.get(layer.split("#")[0], 0.0)), False
    return stage * float(radius), False


def root_mean_square(input: Tensor) -> Tensor:
    """Over all entries, in at least float32."""
    return input.detach().to(torch.promote_types(input.dtype, torch.float32)).square().mean().sqrt()


def common_root_mean_square(input: Tensor) -> Tensor:
    """`root_mean_square` of the inputs of all processes together. Every process has to call this."""
    own = root_mean_square(input)
    sums = torch.stack([own.square() * input.numel(), torch.full_like(own, input.numel())])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt()


def unknown_layer(name: str, known: Iterable[str]) -> InputError:
    """The error for a layer name that the model does not have, with the names that are close to it."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 3, 0.5)
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"layers: {', '.join(known) or 'none'}"
    return InputError(f"unknown layer {name!r}; {hint}")
