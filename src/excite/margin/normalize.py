"""Data that are normalized outside of the model: margins in the unit of the pixels.

A data loader often gives (pixel − mean)/std. A margin in that unit differs from channel to channel and between datasets. With
`normalize=(mean, std)` the model is composed with the normalization, and the search runs over pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.checks import Bounds, shown
from excite.errors import InputError

Normalize = tuple[Any, Any]  # (mean, std), numbers or one per channel
_ROUNDING = 1e-4  # of the range of the pixels, by which a pixel that was normalized and back may leave the bounds


@dataclass(frozen=True)
class Unit:
    """The unit of margins: the range of one element of an input.

    Attributes:
        low: Smallest value of an element.
        high: Largest value of an element.
        pixels: Whether inputs are images (N, channels, height, width), so that an element is a pixel.

    Example:
        >>> excite.margins(model, x.clamp(0, 1), y, bounds=(0, 1)).unit
        Unit(low=0.0, high=1.0, pixels=False)
    """

    low: float
    high: float
    pixels: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return {"low": self.low, "high": self.high, "pixels": self.pixels}


class NormalizedInput(nn.Module):
    """The model as a function of pixels: model((x − mean)/std), its input under the keyword `key` if one is given."""

    def __init__(self, model: nn.Module, mean: Tensor | None, std: Tensor | None, key: str | None = None):
        super().__init__()
        self.model, self.key = model, key
        self.mean: Tensor | None
        self.std: Tensor | None
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Any:
        """Returns the model's output for pixels x."""
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        return self.model(x) if self.key is None else self.model(**{self.key: x})


def is_images(x: Tensor) -> bool:
    """Whether inputs have the shape of images: (N, channels, height, width) with 1, 3 or 4 channels."""
    return x.dim() == 4 and x.shape[1] in (1, 3, 4) and min(x.shape[2:]) > 1


def unit_of(x: Tensor, bounds: Bounds | None) -> Unit | None:
    """The unit of margins of points x within bounds; None unless the bounds are two finite numbers."""
    if bounds is None:
        return None
    low, high = (torch.as_tensor(bound) for bound in bounds)
    if low.numel() != 1 or high.numel() != 1 or not bool(torch.isfinite(low) & torch.isfinite(high)) or low >= high:
        return None
    return Unit(float(low), float(high), is_images(x))


def pixel_range(tensors: Sequence[Tensor]) -> tuple[float, float] | None:
    """(0, 1) for images within it, (−1, 1) for those that were scaled to it; None for anything else."""
    if not tensors or not all(len(x) and x.is_floating_point() and is_images(x) for x in tensors):
        return None
    low, high = min(float(x.min()) for x in tensors), max(float(x.max()) for x in tensors)
    if low >= 0 and 0.5 < high <= 1:
        return (0.0, 1.0)
    return (-1.0, 1.0) if -1 <= low < -0.5 and 0.5 < high <= 1 else None


def check_normalize(normalize: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as tensors that broadcast to x (N, channels, ...)."""
    channels = x.shape[1] if x.dim() > 1 else 1
    try:
        mean, std = (torch.as_tensor(value, dtype=x.dtype, device=x.device).reshape(-1) for value in normalize)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"normalize: expected (mean, std), each a number or one number per channel; got {shown(normalize)}"
        ) from error
    for name, value in (("mean", mean), ("std", std)):
        if len(value) not in (1, channels):
            raise InputError(
                f"normalize: expected a {name} of {_one_or(channels)}, for inputs {tuple(x.shape)}; got {len(value)}"
            )
    if not bool(torch.isfinite(mean).all() & torch.isfinite(std).all() & (std > 0).all()):
        raise InputError(f"normalize: expected finite numbers and a std above 0; got {shown(normalize)}")
    shape = (1, -1, *[1] * (x.dim() - 2)) if x.dim() > 1 else (-1,)
    return mean.reshape(shape), std.reshape(shape)


def _one_or(channels: int) -> str:
    return "1 number" if channels == 1 else f"1 or {channels} numbers"


def unnormalized(x: Tensor, mean: Tensor, std: Tensor, bounds: Bounds) -> Tensor:
    """The pixels x·std + mean; those that leave the bounds by rounding only are put back."""
    pixels = x * std + mean
    try:
        low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in bounds)
        inside = torch.minimum(torch.maximum(pixels, low), high)
    except (TypeError, ValueError, RuntimeError):  # refused where bounds are checked
        return pixels
    return torch.where((pixels - inside).abs() <= _ROUNDING * (high - low), inside, pixels)


def in_pixels(
    model: nn.Module, x: Any, normalize: Normalize | None, bounds: Bounds | None, layers: str | tuple[str, ...]
) -> tuple[nn.Module, Any, Bounds | None]:
    """Model, points and bounds in the unit of the pixels; as they are without `normalize`."""
    if normalize is None:
        return model, x, bounds
    if layers != "input":
        raise InputError("normalize changes the unit of the input only: leave it out, or choose layers='input'")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
        return model, x, bounds  # refused where points are checked
    mean, std = check_normalize(normalize, x)
    bounds = (0.0, 1.0) if bounds is None else bounds
    return NormalizedInput(model, mean, std), unnormalized(x, mean, std, bounds), bounds
