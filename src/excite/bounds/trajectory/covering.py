"""How many balls of a radius cover data: what a sample proves from below, and what its box gives from above."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.checks import check_number, check_tensor, check_values, shown
from excite.errors import InputError


@dataclass(frozen=True)
class Covering:
    """Bounds on N(𝒳; ℓ₂, r), the number of Euclidean balls of radius r needed to cover 𝒳.

    Args:
        radius: r.
        at_least: Number of points of the sample with pairwise distances above 2r, no two of which fit one ball; true for
            every 𝒳 that holds the sample.
        at_most: Number of balls that cover the box of the sample along its principal axes, a cube of side 2r/√k in each, k the
            number of axes along which it extends; true for every 𝒳 inside that box.
        points: Size of the sample.
        dimension: k.

    Example:
        >>> import torch
        >>> from excite.bounds import covering_number
        >>> covering_number(torch.tensor([[0.0], [1.0], [5.0]]), 1.0).at_least
        2
    """

    radius: float
    at_least: int
    at_most: float
    points: int
    dimension: int


def covering_number(x: Tensor, radius: float) -> Covering:
    """Bounds on the covering number of the set that a sample stands for.

    From below greedily: the point farthest from all chosen so far, until none is farther than 2r.

    Args:
        x: Sample (N, ...).
        radius: r ≥ 0.

    Returns:
        The number of balls from below and from above.

    Raises:
        InputError: If the sample is empty or not finite, or the radius is negative.

    Example:
        >>> import torch
        >>> from excite.bounds import covering_number
        >>> cover = covering_number(torch.tensor([[0.0], [1.0], [5.0]]), 1.0)
        >>> cover.at_least, cover.at_most
        (2, 3)
    """
    if check_tensor(x, "a sample", floating=False).dim() < 1 or not x.numel() or x.is_complex():
        raise InputError(f"expected a sample of at least one point of real numbers; got {shown(x)}")
    check_values([x], "points")
    if not (isinstance(radius, float) and radius == math.inf):
        radius = check_number(radius, "radius", 0)
    flat = x.detach().double().cpu().reshape(len(x), -1)
    centred = flat - flat.mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False)
    turned = centred @ axes.Vh.T
    sides = turned.amax(0) - turned.amin(0)
    sides = sides[sides > 1e-9 * float(sides.max())] if float(sides.max()) > 0 else sides[:0]
    k = len(sides)
    return Covering(radius, _apart(flat, 2 * radius), _cubes(sides, radius), len(flat), k)


def _cubes(sides: Tensor, radius: float) -> float:
    if not len(sides):
        return 1.0
    if radius == 0:
        return math.inf
    return math.prod(max(1.0, math.ceil(side * math.sqrt(len(sides)) / (2 * radius))) for side in sides.tolist())


def _apart(points: Tensor, distance: float) -> int:
    nearest = torch.linalg.vector_norm(points - points[0], dim=1)
    count = 1
    while float(nearest.max()) > distance:
        chosen = points[int(nearest.argmax())]
        nearest = torch.minimum(nearest, torch.linalg.vector_norm(points - chosen, dim=1))
        count += 1
    return count
