"""Networks with one hidden layer on the plane, exactly: f(x) = w · (Vx + b)₊ + c, linear on the cells that units cut out.

The lines V_k·x + b_k = 0 cut a box into convex cells; on each of them f is affine, so that {f = 0} is a list of segments
and the distance of a point from it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class TwoLayer(NamedTuple):
    """Hidden weights V (r, 2) and biases b (r,), output weights w (r,) and bias c, an array of shape ()."""

    hidden: Array
    hidden_bias: Array
    output: Array
    output_bias: Array

    def __call__(self, x: Array) -> Array:
        """Outputs (N,) for points (N, 2)."""
        return np.asarray(np.maximum(x @ self.hidden.T + self.hidden_bias, 0) @ self.output + self.output_bias)


def margins(network: TwoLayer, x: Array, y: Array) -> Array:
    """The distance of each point (N, 2) from the decision boundary f = 0, zero where its label in {0, 1} is not met.

    f > 0 decides for label 1. A point that is classified correctly lies no farther from the boundary than from the nearest
    point that is decided otherwise; infinite where there is none within the box of `around`.
    """
    right = (network(x) > 0) == (y == 1)
    far = distances(x, zero_set(network, around(x)))
    return np.where(right, far, 0.0)


def around(x: Array) -> tuple[Array, Array]:
    """Two corners of a box that reaches beyond the points by the diameter of their own box: it has their nearest zeros."""
    low, high = x.min(0), x.max(0)
    length = float(np.linalg.norm(high - low))
    return low - length, high + length


def zero_set(network: TwoLayer, box: tuple[Array, Array]) -> Array:
    """{f = 0} inside the box, as segments (S, 2, 2): ends, coordinates."""
    result = []
    for corners, slope, height in cells(network, box):
        ends = _crossings(corners, corners @ slope + height)
        if len(ends) == 2:
            result.append(ends)
    return np.array(result).reshape(-1, 2, 2)


def cells(network: TwoLayer, box: tuple[Array, Array]) -> Iterator[tuple[Array, Array, float]]:
    """Corners (n, 2) in order, slope (2,) and height of f(x) = slope · x + height, for each cell inside the box."""
    (left, low), (right, high) = box
    square = np.array([[left, low], [right, low], [right, high], [left, high]])
    pieces: list[tuple[Array, list[bool]]] = [(square, [])]
    for direction, offset in zip(network.hidden, network.hidden_bias):
        split: list[tuple[Array, list[bool]]] = []
        for corners, active in pieces:
            values = corners @ direction + offset
            for side in (True, False):
                polygon = _clip(corners, values if side else -values)
                if len(polygon) > 2:
                    split.append((polygon, [*active, side]))
        pieces = split
    for corners, active in pieces:
        on = np.array(active)
        slope = network.output[on] @ network.hidden[on]
        yield corners, slope, float(network.output[on] @ network.hidden_bias[on] + network.output_bias)


def distances(points: Array, segments: Array) -> Array:
    """From each point (N, 2) to the nearest of the segments (S, 2, 2); infinite if there are none."""
    if not len(segments):
        return np.full(len(points), math.inf)
    start, along = segments[:, 0], segments[:, 1] - segments[:, 0]
    length = np.maximum((along**2).sum(1), 1e-300)
    off = points[:, None] - start  # (N, S, 2)
    fraction = np.clip((off * along).sum(2) / length, 0, 1)
    return np.asarray(np.linalg.norm(off - fraction[..., None] * along, axis=2).min(1))


def _clip(corners: Array, values: Array) -> Array:
    """The part of a convex polygon where `values`, affine and known at its corners, are positive."""
    if (values > 0).all():
        return corners
    inside = []
    for k in range(len(corners)):
        a, b = values[k - 1], values[k]
        if (a > 0) != (b > 0):
            inside.append(corners[k - 1] + (corners[k] - corners[k - 1]) * (a / (a - b)))
        if b > 0:
            inside.append(corners[k])
    return np.array(inside).reshape(-1, 2)


def _crossings(corners: Array, values: Array) -> list[Array]:
    return [
        corners[k - 1] + (corners[k] - corners[k - 1]) * (values[k - 1] / (values[k - 1] - values[k]))
        for k in range(len(corners))
        if (values[k - 1] > 0) != (values[k] > 0)
    ]
