"""A search that uses no gradient: it must not find anything smaller than the one that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from excite.margin.constraints import Room, column, length
from excite.margin.problem import Decision
from excite.margin.search import Found, Noise, nothing, to_boundary


def from_others(
    decision: Decision,
    x: Tensor,
    room: Room,
    pool: Tensor,
    chosen: Tensor,
    noise: Noise,
    nearest: int = 5,
    *,
    at: Tensor | None = None,
    lift: Callable[[Tensor], Tensor] | None = None,
) -> Found:
    """Breaking perturbations that lead straight to other inputs, shrunk to the boundary.

    pool (M, ...) are inputs and chosen (M,) the classes the model decides for there: of those decided otherwise than
    the label the `nearest` are tried. If there are none, a few corners of the bounds or random directions.
    Where points are compared by something else than x, `at` is that (one row for each x, `pool` rows of the same) and
    lift(change of it) the perturbation that makes the change.
    """
    found = nothing(x)
    at = x if at is None else at
    apart = torch.cdist(at.flatten(1), pool.flatten(1), p=torch.inf if room.norm == "inf" else 2.0)
    apart = apart.masked_fill(chosen[None, :] == decision.labels[:, None], torch.inf)
    for k in range(min(nearest, len(pool))):
        distance, which = apart.kthvalue(k + 1, dim=1)
        index = torch.nonzero(torch.isfinite(distance))[:, 0]
        way = pool[which] - at
        _along(decision, x, room, room.clip(way if lift is None else lift(way)), index, found)
    index = torch.nonzero(torch.isinf(found.radius))[:, 0]
    for d in _extremes(x, room, noise) if len(index) else ():
        _along(decision, x, room, room.clip(d), index, found)
    return to_boundary(decision, x, room, found)


def _along(decision: Decision, x: Tensor, room: Room, d: Tensor, index: Tensor, found: Found) -> None:
    """Bisect between the points `index` and their perturbations d, and keep what is broken and smaller."""
    if not len(index):
        return
    decision, room, x, d = decision.rows(index), room.rows(index), x[index], d[index]
    low, high = x.new_zeros(len(x)), x.new_ones(len(x))
    for _ in range(10):
        middle = (low + high) / 2
        broken = decision.look(x + column(middle, d) * d)[1]
        high, low = torch.where(broken, middle, high), torch.where(broken, low, middle)
    d = column(high, d) * d
    broken = decision.look(x + d)[1]
    found.take(index[broken], room.length(d)[broken], d[broken])


def _extremes(x: Tensor, room: Room, noise: Noise) -> Iterator[Tensor]:
    if room.low is not None and room.high is not None and not room.partly:
        yield room.low
        yield room.high
        for _ in range(4):
            yield torch.where(noise(x.shape, x) > 0, room.high, room.low)
        return
    for times in (1e-6, 1e-5, 1e-4, 1e-3):  # the reach is a million times the spread of the data
        way = room.direction(noise(x.shape, x)) * column(times * room.reach, x)
        yield way
        yield -way


def blind_search(decision: Decision, x: Tensor, room: Room, start: Found, noise: Noise, queries: int) -> Found:
    """Shrink the perturbations of `start` by random changes of blocks of coordinates, `queries` per point.

    A candidate is the current perturbation with one random block of consecutive coordinates changed, brought to a
    radius a little below the best. It becomes current if its slack is not larger, and the best if it breaks the point.
    """
    index = torch.nonzero(torch.isfinite(start.radius))[:, 0]
    best = Found(start.radius.clone(), start.d.clone())
    if not len(index):
        return best
    decision, room, x = decision.rows(index), room.rows(index), x[index]
    d, radius = start.d[index].clone(), start.radius[index].clone()
    slack = torch.full_like(radius, torch.inf)
    shrink = torch.full_like(radius, 0.2)
    tries = torch.zeros_like(radius)
    for query in range(queries):
        share = max(0.5 * 0.02 ** (query / queries), 1.5 / x[0].numel())
        target = radius * (1 - shrink)
        candidate = room.fit(_changed(d, target, share, room, noise), target)
        value, broken = decision.look(x + candidate)
        # Rounding in `fit` may leave a norm a hair above the target, never above the radius.
        best.take(index[broken], room.length(candidate)[broken], candidate[broken])
        better = broken | (value <= slack)
        d = torch.where(column(better, d), candidate, d)
        slack = torch.where(broken, torch.inf, torch.where(better, value, slack))
        radius = torch.where(broken, target, radius)
        tries = torch.where(broken, 0, tries + 1)
        shrink = torch.where(broken, (shrink * 1.5).clamp(max=0.3), shrink)
        stuck = tries >= 12  # aim less low, from the last broken perturbation
        shrink = torch.where(stuck, (shrink / 2).clamp(min=1e-3), shrink)
        d = torch.where(column(stuck, d), best.d[index], d)
        slack, tries = torch.where(stuck, torch.inf, slack), torch.where(stuck, 0, tries)
    return best


def _changed(d: Tensor, radius: Tensor, share: float, room: Room, noise: Noise) -> Tensor:
    """d with a block of consecutive coordinates moved: to a corner of the ball ("inf"), by noise or to zero ("2")."""
    flat = d.flatten(1)
    size = flat.shape[1]
    span = max(1, round(share * size))
    draws = noise(torch.Size((len(d), 3)), d)
    begin = ((draws[:, 0] * 7919.0) % 1.0 * (size - span + 1)).long()[:, None]
    at = torch.arange(size, device=d.device)[None]
    block = (at >= begin) & (at < begin + span)
    if room.norm == "inf":
        # one sign for the whole block, or each coordinate turned round
        corner = torch.where(draws[:, 1:2] > 0, draws[:, 2:].sign() * radius[:, None], -flat)
        return torch.where(block, corner, flat).reshape(d.shape)
    wild = noise(flat.shape, flat)
    wild = wild * block
    wild = wild * (radius / length(wild, "2").clamp_min(1e-12))[:, None] * draws[:, 2:].abs() * share**0.5
    return torch.where(draws[:, 1:2] > 0, flat + wild, torch.where(block, 0.5 * flat, flat)).reshape(d.shape)
