"""The largest local Lipschitz constant along segments, exact for piecewise-linear models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Pick
from excite._core.checks import check_count, check_model, check_tensor, check_weights, model_errors, shown
from excite.errors import InputError
from excite.lipschitz.local_constants import local
from excite.lipschitz.signatures import check_bend, check_gradient, points_at_once, signatures

_SPARE = 8  # bits between where halving stops and what counts as a piece


@dataclass(frozen=True)
class Segments:
    """Local Lipschitz constants along B segments.

    Attributes:
        values: The largest local constant on each segment (B,); infinite where the output jumps on it.
        breaks: By segment, the ends of its p linear pieces (p + 1,), from 0 to 1.
        slopes: By segment, the local constant on each piece (p,).
        jumps: By segment, how far the output jumps between one piece and the next (p − 1,): the largest change of an output,
            0 where the model is continuous. Models with `sign`, `floor` or `round` jump; `x * (x > 0)` does not.

    Example:
        >>> segments = along(nn.Linear(2, 1), torch.zeros(3, 2), torch.ones(3, 2))
        >>> segments.values.shape, segments.breaks[0].tolist()
        (torch.Size([3]), [0.0, 1.0])
    """

    values: Tensor
    breaks: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]
    jumps: tuple[Tensor, ...] = ()

    @property
    def pieces(self) -> Tensor:
        """Number of linear pieces of each segment, (B,)."""
        return torch.tensor([len(slopes) for slopes in self.slopes])


@model_errors
def along(
    model: nn.Module, start: Tensor, end: Tensor, norm: object = "2", *, limit: int = 10_000, output: Pick = None
) -> Segments:
    """Computes the largest local Lipschitz constant on segments, exactly, for piecewise-linear models.

    Points on the same side of every kink have only such points between them. So each segment is halved wherever its ends
    differ, all segments together, down to 2⁻⁴⁸ of its length in double precision (2⁻¹⁹ in single): every piece longer
    than 2⁻⁴⁰ (2⁻¹¹) of it is found. The constants are those of `local` inside each piece.

    Args:
        model: A piecewise-linear model.
        start: Start points (B, ...).
        end: End points (B, ...).
        norm: Norm of the constants, as in `local`.
        limit: Largest number of kinks on all segments together; one segment through a network for images can have tens
            of thousands.
        output: Selects the output of a model that returns a tuple or a dict.

    Returns:
        The largest constant on each segment, infinite where the output jumps, and its linear pieces.

    Raises:
        ModelError: If the model is not piecewise linear; the operator is named.
        InputError: If the shapes differ, or the segments cross more than `limit` kinks.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> segments = along(net, torch.zeros(1, 2), torch.ones(1, 2))
        >>> segments.values, segments.pieces
    """
    check_weights(check_model(model))
    check_tensor(start, "start points"), check_tensor(end, "end points")
    if start.shape != end.shape or start.dim() == 0 or start.dtype != end.dtype:
        raise InputError(
            f"expected start and end points (B, ...) of the same shape and dtype; got {shown(start)} and {shown(end)}"
        )
    limit = check_count(limit, "limit")
    start, step = start.detach(), (end - start).detach()
    depth = int(-math.log2(torch.finfo(start.dtype).eps)) - 4 if start.is_floating_point() else 0

    def at(segments: Tensor, t: Tensor) -> Tensor:
        t = t.to(start.dtype).view(-1, *[1] * (start.dim() - 1))
        return start[segments] + t * step[segments]

    pieces_of = partial(signatures, model, output=output, at_once=points_at_once(model, start, output=output))
    intervals = _halve(pieces_of, at, start, end, depth, limit)
    breaks, middles, homes = _merge(len(start), *intervals, 2.0 ** (_SPARE - depth))
    points = at(homes, middles)
    slopes = local(model, points, norm, output=output) if len(points) else start.new_zeros(0)
    sizes = [len(ends) - 1 for ends in breaks]
    slopes_by_segment = tuple(slopes.split(sizes))
    if not len(points):
        return Segments(slopes, tuple(breaks), slopes_by_segment)
    first, last, middle, change, eps = _check_linear(pieces_of, at, homes, breaks)
    check_gradient(model, points, last - first, change, eps, output=output)
    jumps = _jumps(middle.split(sizes), change.split(sizes), eps)
    largest = [
        slope.max() if not bool(jump.any()) else slope.new_tensor(math.inf)
        for slope, jump in zip(slopes_by_segment, jumps)
    ]
    return Segments(torch.stack(largest), tuple(breaks), slopes_by_segment, jumps)


def _halve(
    pieces_of: Any, at: Any, start: Tensor, end: Tensor, depth: int, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Intervals whose ends are on the same piece: the segment of each, its two ends, and the number of its piece."""
    count = len(start)
    segments = torch.arange(count, device=start.device)
    low, high = torch.zeros(count).double(), torch.ones(count).double()
    low, high = low.to(start.device), high.to(start.device)
    left, right = pieces_of(start)[0], pieces_of(end)[0]
    done: list[tuple[Tensor, ...]] = []
    for _ in range(depth):
        differ = left != right
        done.append(tuple(tensor[~differ] for tensor in (segments, low, high, left)))
        segments, low, high, left, right = (tensor[differ] for tensor in (segments, low, high, left, right))
        if not len(segments):
            break
        if len(segments) > limit:
            raise InputError(f"the segments cross more than {limit} kinks: take fewer or shorter ones, or raise limit=")
        middle = (low + high) / 2
        between = pieces_of(at(segments, middle))[0]
        segments, low, high = torch.cat([segments, segments]), torch.cat([low, middle]), torch.cat([middle, high])
        left, right = torch.cat([left, between]), torch.cat([between, right])
    segment, first, last, piece = (torch.cat(tensors) for tensors in zip(*done))
    return segment, first, last, piece


def _merge(
    count: int, segments: Tensor, low: Tensor, high: Tensor, number_of_piece: Tensor, shortest: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Breaks of each segment, and the middle and the segment of each piece. What is too short joins its neighbours."""
    order = torch.argsort(low, stable=True)
    order = order[torch.argsort(segments[order], stable=True)]
    rows = list(zip(*(tensor[order].tolist() for tensor in (segments, low, high, number_of_piece))))
    pieces: list[list[list[float]]] = [[] for _ in range(count)]
    for i, first, last, number in rows:
        segment = pieces[int(i)]
        if segment and segment[-1][2] == number:
            segment[-1][1] = last
        else:
            segment.append([first, last, number])
    breaks, middles, homes = [], [], []
    for i, segment in enumerate(pieces):
        long = [piece for piece in segment if piece[1] - piece[0] >= shortest] or [[0.0, 1.0, 0]]
        edges = [0.0, *((a[1] + b[0]) / 2 for a, b in pairwise(long)), 1.0]
        breaks.append(torch.tensor(edges, dtype=torch.float64))
        middles += [(piece[0] + piece[1]) / 2 for piece in long]
        homes += [i] * len(long)
    device = segments.device
    return (
        breaks,
        torch.tensor(middles, dtype=torch.float64, device=device),
        torch.tensor(homes, dtype=torch.long, device=device),
    )


def _check_linear(
    pieces_of: Any, at: Any, homes: Tensor, breaks: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """On each piece the output in the middle is the mean of two others, or something bends that was not recognized.

    Returns those two points of each piece, the output in the middle, how the output changes from one point to the other (over
    half the piece), and the eps of the numbers.
    """
    low = torch.cat([pieces[:-1] for pieces in breaks]).to(homes.device)
    long = torch.cat([pieces[1:] for pieces in breaks]).to(homes.device) - low
    first, half, last = (at(homes, low + fraction * long) for fraction in (0.25, 0.5, 0.75))
    pieces = [pieces_of(points) for points in (first, half, last)]
    left, middle, right = (outputs for _, outputs, _ in pieces)
    eps = max(eps for *_, eps in pieces)
    check_bend((left - 2 * middle + right).abs(), middle, eps)
    return first, last, middle, right - left, eps


def _jumps(middles: Sequence[Tensor], changes: Sequence[Tensor], eps: float) -> tuple[Tensor, ...]:
    """By segment, how far apart the outputs are that two neighbouring pieces reach at the break between them.

    On a piece the output is linear: it ends at the middle plus the change over half of it. Differences as small as the rounding
    that `check_bend` allows are 0.
    """
    scale = max(1.0, max((float(middle.abs().amax()) for middle in middles if middle.numel()), default=1.0))
    jumps = []
    for middle, change in zip(middles, changes):
        ends, starts = middle + change, middle - change
        apart = (starts[1:] - ends[:-1]).abs().flatten(1).amax(1)
        jumps.append(torch.where(apart > 1e4 * eps * scale, apart, 0))
    return tuple(jumps)
