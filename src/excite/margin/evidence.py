"""Evidence that the search worked: an attack that fails is not a margin."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from excite.margin.batches import Task
from excite.margin.constraints import Room
from excite.margin.problem import Decision
from excite.margin.gradient_free import blind_search
from excite.margin.search import Found

_CHECKED = 64  # points given to the gradient-free search, or all of them if it wins too often
_QUERIES = 300  # forward passes it may use for each
_AGREE = 1.1  # two searches agree if the larger radius is at most this many times the smaller
_BEATEN = 0.99  # the gradient-free search has won if its radius is below this share of the other
_MISLED = 10.0


@dataclass(frozen=True)
class Evidence:
    """Counts over the `attacked` points, those that are not misclassified from the start.

    flat: the gradient at the point is exactly zero, so that nothing says where to go.
    lost: no gradient search broke the point, but moving straight to another data point, within the bounds, does.
    unbroken: nothing broke the point (censored).
    apart, alone: the best two independent searches end more than 10 % apart, or more than a factor of 2, so that only
    one of them worked; None if there was one search only.
    checked, beaten: points given to the gradient-free search, and those where it found a perturbation more than 1 %
    smaller; `margins` then counts the smaller one.
    misled: the gradient at the point puts the boundary more than 10 times farther away than it is. Not a failure by
    itself, since the search does not stop there, but searches that take small steps from the point do fail so.
    """

    attacked: int
    flat: int
    lost: int
    unbroken: int
    apart: int | None
    alone: int | None
    checked: int
    beaten: int
    misled: int

    def flags(self) -> tuple[str, ...]:
        """Why the margins should not be trusted, a sentence each; empty if nothing speaks against them.

        A sign of failure counts against the whole model where it shows at more than one point in 20 (for `apart` three
        in 20), and at more than a single point unless there is no other.
        """
        n = self.attacked
        signs = [
            (self.flat, n, 0.05, "the gradient is exactly zero"),
            (self.lost, n, 0.05, "no gradient search broke the point, but moving to another data point does"),
            (self.unbroken, n, 0.05, "nothing broke the point"),
            (self.apart or 0, n, 0.15, "independent searches end more than 10 % apart"),
            (self.alone or 0, n, 0.05, "only one of the independent searches came within twice the margin"),
            (self.beaten, self.checked, 0.05, "a search without gradients found a smaller perturbation"),
        ]
        return tuple(
            f"at {count} of {of} points {what}"
            for count, of, share, what in signs
            if count and (count == of or count > max(1, share * of))
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"a search without gradients was better at {self.beaten} of {self.checked} points"]
        if self.apart is not None:
            parts.append(f"independent searches agree at {self.attacked - self.apart} of {self.attacked}")
        if self.misled > 0.05 * self.attacked:
            parts.append(
                f"at {self.misled} the gradient puts the boundary more than 10 times too far away, which misleads weaker "
                "attacks"
            )
        return "; ".join(parts)


def gather(task: Task, found: Found) -> tuple[Evidence, Tensor]:
    """The evidence, and the points (N,) in doubt. Smaller perturbations that the check finds replace those in `found`."""
    attacked, before = task.right, found.radius.clone()
    checked, others = _sample(task)
    _check(task, found, checked)
    if int((found.radius < _BEATEN * before).sum()) > 0.05 * len(checked):
        _check(task, found, others)
        checked = torch.cat([checked, others])
    beaten = found.radius < _BEATEN * before
    flat = attacked & torch.isinf(task.estimate)
    unbroken = torch.isinf(found.radius)
    apart, alone = None, torch.zeros_like(attacked)
    if len(task.runs) > 1:
        first, second = torch.stack(task.runs).topk(2, dim=0, largest=False).values
        apart = int((attacked & (second > _AGREE * first)).sum())
        alone = attacked & (second > 2 * first)
    evidence = Evidence(
        attacked=int(attacked.sum()),
        flat=int(flat.sum()),
        lost=int(task.lost.sum()),
        unbroken=int(unbroken.sum()),
        apart=apart,
        alone=None if apart is None else int(alone.sum()),
        checked=len(checked),
        beaten=int(beaten.sum()),
        misled=int((attacked & (task.estimate > _MISLED * found.radius)).sum()),
    )
    return evidence, flat | task.lost | unbroken | beaten | alone


def _check(task: Task, found: Found, points: Tensor) -> None:
    for index in points.split(task.size) if len(points) else ():
        decision, x, room = _rows(task, index)
        start = task.others(decision, index)
        blind = blind_search(decision, x, room, start, task.noise, _QUERIES)
        found.take(index, blind.radius, blind.d)


def _sample(task: Task) -> tuple[Tensor, Tensor]:
    """About `_CHECKED` of the attacked points, evenly taken, and the others."""
    index = torch.nonzero(task.right)[:, 0]
    every = max(1, -(-len(index) // _CHECKED))
    taken = torch.arange(len(index), device=index.device) % every == 0
    return index[taken], index[~taken]


def _rows(task: Task, index: Tensor) -> tuple[Decision, Tensor, Room]:
    return task.decision.rows(index), task.x[index], task.room.rows(index)
