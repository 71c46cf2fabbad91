"""How hard to search within a budget of passes or seconds: the most that is sure to fit, and what is left out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from excite._core.checks import check_number, shown
from excite.errors import InputError
from excite.margin.problem import MarginProblem

Unit = Literal["passes", "seconds"]
SearchBudget = tuple[float, Unit]
TARGET_STEPS = 14  # of a search towards one class
ROUNDS = 2  # such searches from parts of the best perturbation, after those towards classes
_LINE_SEARCH = 8 + 2 + 6  # forward passes of the line search at the end, and of the check against rounding
_STEPS = (40, 30, 20, 14, 10, 7, 5, 3, 2)


@dataclass(frozen=True)
class Effort:
    """The searches of one call: `restarts` of `steps` steps, then short ones towards `targets` of the other `classes` each.

    retry: whether points without an adversarial example are searched again from other starts. few: whether inputs have so few
    elements that they are explored from random perturbations too.
    """

    restarts: int
    steps: int
    targets: int
    classes: int
    retry: bool = True
    few: bool = False

    @property
    def cost(self) -> int:
        """Forward and backward passes per point, at most; those of `retry` excepted."""
        many = self.classes > 2
        choices = 1 + min(10, self.classes - 1) if many else 0
        towards = (choices + 2 * TARGET_STEPS * (self.targets + ROUNDS) + 1) if many and self.targets else 0
        polish = 2 * max(2, 2 * self.steps // 5)
        explored = self.restarts // 3 if self.few else 0
        edges = 2 * 2 * 2 * self.steps if explored else 0
        exploration = explored * (2 * 8 + self.steps) + edges
        return choices + 4 + 2 * self.steps * self.restarts + towards + exploration + polish + _LINE_SEARCH


def check_budget(budget: Any) -> SearchBudget | None:
    """A pair such as (200, "passes") or (30, "seconds")."""
    if budget is None:
        return None
    if not isinstance(budget, tuple | list) or len(budget) != 2 or budget[1] not in ("passes", "seconds"):
        raise InputError(f"budget: expected a pair such as (200, 'passes') or (30, 'seconds'); got {shown(budget)}")
    return check_number(budget[0], "budget", 0, above=True), budget[1]


def affordable(full: Effort, passes: float, seconds: float | None = None) -> Effort:
    """The most of `full` that costs at most `passes`: first fewer classes are searched one by one, then fewer times, then shorter.

    `seconds` is what the budget was given as, if not as passes; it is named where the budget is too small.

    Raises:
        InputError: if not even the shortest search fits.
    """
    if full.cost <= passes:
        return full
    ladder = [
        replace(full, restarts=restarts, targets=targets, retry=False)
        for restarts in range(full.restarts, 0, -1)
        for targets in sorted({full.targets, min(1, full.targets), 0}, reverse=True)
    ]
    ladder += [replace(full, restarts=1, targets=0, steps=steps, retry=False) for steps in _STEPS if steps < full.steps]
    for effort in ladder:
        if effort.cost <= passes:
            return effort
    cheapest = ladder[-1].cost
    if seconds is not None:
        raise InputError(
            f"budget: expected at least {seconds * cheapest / passes:.2g} seconds for these points, the shortest search; got {seconds:.4g}"
        )
    raise InputError(f"budget: expected at least {cheapest} passes per point, the shortest search; got {passes:.4g}")


def passes_in(seconds: float, problem: MarginProblem, correct: Tensor, batch: int) -> float:
    """Passes per point that fit into `seconds`, from the time of one gradient of some points."""
    index = torch.nonzero(correct)[:, 0][:batch]
    if not len(index):
        return float("inf")
    subset = problem.rows(index)
    for _ in range(2):  # the first chooses kernels
        start = time.perf_counter()
        subset.decision.gradients(subset.x)[0].sum().item()  # waits for the device
        seconds_of_one = time.perf_counter() - start
    batches = -(-int(correct.sum()) // batch)
    return 2 * seconds / (seconds_of_one * batches)


def left_out(full: Effort, taken: Effort, budget: SearchBudget, censored: int) -> str | None:
    """Describes what the budget left out; None if nothing."""
    if taken == full:
        return None
    omitted = []
    if (taken.restarts, taken.steps) != (full.restarts, full.steps):
        omitted.append(f"{taken.restarts} of {full.restarts} searches, with {taken.steps} of {full.steps} steps")
    if taken.classes > 2 and taken.targets < full.targets:
        omitted.append(f"{taken.targets} of {min(full.targets, full.classes - 1)} classes searched one by one")
    if censored:
        omitted.append(f"{censored} points without an adversarial example not searched again")
    return f"budget of {budget[0]:g} {budget[1]}{' per point' if budget[1] == 'passes' else ''}: " + "; ".join(omitted)
