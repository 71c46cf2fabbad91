"""Size, largest entry and kurtosis of the activations of a block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.intercept.together import Together
from excite.probes.vital_signs.tokens import wide


@dataclass(frozen=True)
class StreamSigns:
    """Size of a residual stream over all entries of all tokens.

    Attributes:
        rms: Root mean square.
        largest: Largest absolute value.
        kurtosis: Fourth central moment over the squared variance; 3 for a normal distribution.
    """

    rms: Tensor
    largest: Tensor
    kurtosis: Tensor


def stream_signs(x: Tensor, tokens: Tensor | None = None) -> StreamSigns:
    """Root mean square, largest entry and kurtosis of activations, over all entries.

    Args:
        x: Activations (..., tokens, width).
        tokens: Mask (..., tokens), 0 for tokens that do not count.

    Returns:
        Tensors with one element each, in float32 or better, left on the device.

    Example:
        >>> import torch
        >>> from excite.probes.vital_signs.stream_signs import stream_signs
        >>> float(stream_signs(torch.tensor([[[1.0, -1.0], [1.0, -1.0]]])).kurtosis)
        1.0
    """
    rms, largest, kurtosis = _signs(x[None], tokens)
    return StreamSigns(rms[0], largest[0], kurtosis[0])


def several_stream_signs(streams: Mapping[str, Tensor], tokens: Tensor | None = None) -> dict[str, StreamSigns]:
    """`stream_signs` of several streams by name; those of one shape are computed together."""
    together: Together[str, None] = Together(lambda key, x: _signs(x, tokens))
    for name, x in streams.items():
        together.add(name, x)
    return {name: StreamSigns(*signs) for name, signs in together.finish().items()}


def _signs(x: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Root mean squares, largest entries and kurtoses, (count,) each, of (count, ..., tokens, width)."""
    x = wide(x)
    axes = tuple(range(1, x.dim()))
    if tokens is None or tokens.shape != x.shape[1:-1]:
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        square = variance + mean.square()
        largest = torch.linalg.vector_norm(x, math.inf, axes)
        fourth = (x - mean).square_().square_().mean(axes)
    else:
        counted = (tokens != 0)[..., None].to(x.dtype)
        total = counted.sum() * x.shape[-1]
        mean = (counted * x).sum(axes, keepdim=True) / total
        variance = (counted * (x - mean).square()).sum(axes, keepdim=True) / total
        square = (counted * x.square()).sum(axes) / total
        largest = (counted * x.abs()).amax(axes)
        fourth = (counted * (x - mean).pow(4)).sum(axes) / total
    return square.flatten().sqrt(), largest, fourth / variance.flatten().square()
