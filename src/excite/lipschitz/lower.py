"""A lower bound on the Lipschitz constant over a set around data, by search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, check_finite
from excite._core.checks import (
    Norm,
    check_count,
    check_model,
    check_number,
    check_pair,
    check_seed,
    check_tensor,
    model_errors,
    parse_norm,
    shown,
)
from excite.errors import InputError
from excite.lipschitz.local_constants import local

Limits = tuple[float, float]


@dataclass(frozen=True)
class Largest:
    """A lower bound on a Lipschitz constant: the largest local constant that was found.

    Attributes:
        value: The local constant at `point`; larger ones may exist.
        point: Where it is reached, one input (...).
        tried: Number of points at which the constant was computed.

    Example:
        >>> result = excite.lipschitz.largest(model, x, radius=0.1)
        >>> result.point.shape, result.value > 0
        (torch.Size([4]), True)
    """

    value: float
    point: Tensor
    tried: int

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"Lipschitz constant at least {self.value:.6g}: the largest over {self.tried} points"


@model_errors
def largest(
    model: nn.Module,
    x: Tensor,
    radius: float,
    norm: object = "2",
    *,
    ball: object = "inf",
    bounds: Limits | None = None,
    rounds: int = 30,
    places: int = 256,
    seed: int = 0,
    output: Pick = None,
) -> Largest:
    """Searches the largest local Lipschitz constant near data: a lower bound on the constant of that set.

    Local constants have no useful gradient, being constant on linear regions, so the search samples points: x, and in each
    round some all over the balls and some at all distances from the best regions so far.

    Args:
        model: Any differentiable model.
        x: Centers of the balls (B, ...).
        radius: Radius of the balls.
        norm: Norm of the constants, as in `local`.
        ball: Norm of the balls, "inf" or "2".
        bounds: Smallest and largest value of an input, if inputs are limited.
        rounds: Number of rounds.
        places: Points near the best regions per round; half as many are drawn all over the balls.
        seed: Seed of the random numbers.
        output: Selects the output of a model that returns a tuple or a dict.

    Returns:
        The largest constant, and the point where it is reached.

    Raises:
        InputError: If there are no inputs, or a setting is out of range.

    Example:
        >>> print(excite.lipschitz.largest(model, x, radius=0.1))
    """
    check_model(model)
    if check_tensor(x, "inputs").dim() == 0 or not len(x):
        raise InputError(f"expected at least one input, with a batch axis in front; got {shown(x)}")
    radius = check_number(radius, "radius", 0)
    rounds, places = check_count(rounds, "rounds"), check_count(places, "places")
    bounds = None if bounds is None else check_pair(bounds, "bounds")
    check_finite(x)
    ball_norm = parse_norm(ball, ("inf", "2"))
    generator = torch.Generator().manual_seed(check_seed(seed))
    centre = x.detach()

    def inside(points: Tensor, home: Tensor) -> Tensor:
        moved = centre[home] + _into_ball(points - centre[home], radius, ball_norm)
        return moved if bounds is None else moved.clamp(*bounds)

    measure = partial(local, model, norm=norm, output=output)
    return _search(measure, inside, centre, radius, rounds, places, generator)


def _search(
    measure: Callable[[Tensor], Tensor],
    inside: Callable[[Tensor, Tensor], Tensor],
    centre: Tensor,
    radius: float,
    rounds: int,
    places: int,
    generator: torch.Generator,
) -> Largest:
    """Keeps the best points, one per region, and proposes others around them; `inside` projects into the balls."""
    max_candidates = max(1, min(64, places // 4))
    home = torch.arange(len(centre))
    best = inside(centre, home)
    values = measure(best)
    tried = len(best)
    for _ in range(rounds):
        top = _apart(values, max_candidates)
        best, home, values = best[top], home[top.cpu()], values[top]
        if not radius:
            break
        proposed, homes = _propose(centre, best, home, radius, places, generator)
        points = inside(proposed, homes)
        best, home = torch.cat([best, points]), torch.cat([home, homes])
        values = torch.cat([values, measure(points)])
        tried += len(points)
    largest = int(values.argmax())
    return Largest(float(values[largest]), best[largest].clone(), tried)


def _propose(
    centre: Tensor, best: Tensor, home: Tensor, radius: float, places: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Points around the best ones, near and far alike, and points all over the balls; and the ball of each."""
    fresh = torch.randint(len(centre), (places // 2 + 1,), generator=generator)
    near = torch.randint(len(best), (places,), generator=generator)
    homes = torch.cat([home[near], fresh])
    start = torch.cat([best[near.to(best.device)], centre[fresh.to(centre.device)]])
    scale = 2.0 ** (-12 * torch.rand(len(homes), generator=generator))
    scale[places:] = 1.0
    shape = centre.shape[1:]
    step = radius * (2 * torch.rand(len(homes), *shape, generator=generator) - 1)
    step = step * scale.view(-1, *[1] * len(shape))
    return start + step.to(start), homes


def _apart(values: Tensor, count: int) -> Tensor:
    """Where the largest values stand, one place for each: equal ones are of the same region."""
    order = values.argsort(descending=True)
    sorted_ = values[order]
    fresh = torch.ones_like(sorted_, dtype=torch.bool)
    fresh[1:] = sorted_[:-1] > sorted_[1:] * (1 + 16 * torch.finfo(values.dtype).eps)
    return order[fresh][:count]


def _into_ball(step: Tensor, radius: float, norm: Norm) -> Tensor:
    if norm == "inf":
        return step.clamp(-radius, radius)
    length = step.reshape(len(step), -1).norm(dim=1).clamp(min=1e-30).view(-1, *[1] * (step.dim() - 1))
    scaled: Tensor = step * (radius / length).clamp(max=1.0)
    return scaled
