"""Size, largest entry and kurtosis of the activations of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
    x = wide(x)
    if tokens is None or tokens.shape != x.shape[:-1]:
        variance, mean = torch.var_mean(x, correction=0)
        square = variance + mean.square()
        largest = torch.linalg.vector_norm(x, math.inf)
        fourth = (x - mean).square_().square_().mean()
    else:
        counted = (tokens != 0)[..., None].to(x.dtype)
        total = counted.sum() * x.shape[-1]
        mean = (counted * x).sum() / total
        variance = (counted * (x - mean).square()).sum() / total
        square = (counted * x.square()).sum() / total
        largest = (counted * x.abs()).amax()
        fourth = (counted * (x - mean).pow(4)).sum() / total
    return StreamSigns(square.sqrt(), largest, fourth / variance.square())
