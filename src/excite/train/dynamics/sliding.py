"""Gradient flow on a kink: where the gradients of both sides lead to it, the path slides along the surface S = 0.

A kink is the zero of a switching value S (`excite.train.dynamics.kinks`). The loss is continuous, so on the surface where some values S_i
are 0 it is one smooth function, whatever the sides: the sliding flow (Filippov's) is the gradient flow of that function, −∇R on
any side, less its part in the span of the normals ∇S_i. It slides as long as no S_i would move away if it were let go:
with the others held, the flow on its positive side has dS_i/dt ≤ 0 and that on its negative side dS_i/dt ≥ 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from excite.train.dynamics.kinks import Side
from excite.train.dynamics.objective import Array, Field

Place = tuple[int, int]  # a switching value: which call, which of its elements
MAX_SURFACES = 8  # surfaces along which the flow slides at the same time
_PARALLEL = 1 - 1e-9  # of the cosine of two normals: the same surface
_STILL = 1e-9  # of the product of norms: a speed that is 0
# Of the largest singular value: normals that depend on each other where S = 0 seem independent by as much as the integrator's error takes
# the point off the surface. Their multipliers would be as large as that error is small, and move the point along all of them.
_DEPENDENT = 1e-6


def tangent(gradient: Array, normals: Array) -> Array:
    """The gradient without its part in the span of the normals (k, P)."""
    if not len(normals):
        return gradient
    direction: Array = gradient - normals.T @ np.linalg.lstsq(normals.T, gradient, rcond=_DEPENDENT)[0]
    return direction


def placed(side: Side, places: Sequence[Place], above: Sequence[bool]) -> Side:
    """The side with these elements above 0, or below."""
    changed = [mask.clone() for mask in side]
    for (call, element), up in zip(places, above):
        changed[call].view(-1)[element] = up
    return changed


def released(field: Field, point: Array, side: Side, places: Sequence[Place]) -> tuple[Side, tuple[Place, ...]]:
    """Releases every surface that the flow leaves.

    Returns the side on which it does, and what is still held. New surfaces come with the side from which they were reached: the other
    is tried first, so that what can be crossed is.
    """
    surfaces = tuple(places)
    while surfaces:
        for group, trial, speed in _trials(field, point, side, surfaces):
            if speed > _STILL:
                side = trial
                surfaces = tuple(surface for i, surface in enumerate(surfaces) if i not in group)
                break
        else:
            return side, surfaces
    return side, surfaces


def leaving(field: Field, point: Array, side: Side, surfaces: Sequence[Place]) -> float:
    """The largest speed at which the flow would leave a surface that is held, over the product of norms; at most 0: none."""
    return max((speed for *_, speed in _trials(field, point, side, surfaces)), default=0.0)


def corrected(field: Field, point: Array, side: Side, surfaces: Sequence[Place]) -> Array:
    """The point moved onto the surfaces: one Newton step takes off what the integrator's error has added up."""
    values, _, normals = field.gradients(point, side, surfaces)
    projected: Array = point - np.linalg.lstsq(normals, values, rcond=_DEPENDENT)[0]
    return projected


def _trials(
    field: Field, point: Array, side: Side, surfaces: Sequence[Place]
) -> Iterator[tuple[list[int], Side, float]]:
    """For every surface and both of its sides: its places, the side, and the speed away from it with the others held."""
    _, _, normals = field.gradients(point, side, surfaces)
    for group in _groups(normals):
        places = [surfaces[i] for i in group]
        first = bool(side[places[0][0]].view(-1)[places[0][1]])
        same = [float(normals[i] @ normals[group[0]]) > 0 for i in group]
        for up in (not first, first):
            trial = placed(side, places, [up == positive for positive in same])
            _, gradient, new_normals = field.gradients(point, trial, surfaces)
            other_normals = np.delete(new_normals, group, axis=0)
            normal = new_normals[group[0]]
            size = float(np.linalg.norm(normal) * np.linalg.norm(gradient))
            speed = float(-tangent(gradient, other_normals) @ normal) * (1 if up else -1)
            yield group, trial, speed / size if size > 0 else 0.0


def _groups(normals: Array) -> list[list[int]]:
    """Switching values with parallel normals vanish on the same surface, as those of two equal points."""
    groups: list[list[int]] = []
    sizes = np.linalg.norm(normals, axis=1)
    for i, normal in enumerate(normals):
        for group in groups:
            product = sizes[i] * sizes[group[0]]
            if product > 0 and abs(float(normal @ normals[group[0]])) >= _PARALLEL * product:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def mask(side: Side, surfaces: Sequence[Place]) -> list[torch.Tensor]:
    """True at the switching values that are held."""
    masks = [torch.zeros_like(positive, dtype=torch.bool) for positive in side]
    return placed(masks, surfaces, [True] * len(surfaces))
