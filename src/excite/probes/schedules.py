"""When to measure: every n steps, at powers of two, or as often as a fraction of the training time allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from excite._core.checks import check_count, check_number, is_number, is_whole, shown
from excite._core.compatibility import renamed_attribute, renamed_keywords
from excite.errors import InputError

_HALF = 0.5  # seconds of training until half of the advance of a `PaidSchedule` may be spent
_INTERVALS = 40  # between measurements, over which a step's typical time is taken


class Schedule(Protocol):
    """When to measure: any object with a method `due(step)`.

    Example:
        >>> class Late:
        ...     def due(self, step: int) -> bool:
        ...         return step >= 1000 and step % 100 == 0
    """

    def due(self, step: int) -> bool:
        """Whether to measure after a step.

        Args:
            step: Optimizer steps so far; 0 before training.

        Returns:
            True to measure now.
        """


@dataclass(frozen=True)
class Every:
    """Before training and then every `n` steps.

    Args:
        n: Number of steps.
        offset: The first of these steps, as a remainder of n: measurements that take long can be kept apart by it.

    Raises:
        InputError: If `n` is not a positive whole number, or `offset` not a whole number from 0.

    Example:
        >>> from excite.probes import Every
        >>> [step for step in range(10) if Every(4).due(step)]
        [0, 4, 8]
        >>> [step for step in range(10) if Every(4, offset=1).due(step)]
        [0, 1, 5, 9]
    """

    n: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_count(self.n, "Every"))
        object.__setattr__(self, "offset", check_count(self.offset, "Every: offset", 0) % self.n)

    def due(self, step: int) -> bool:
        """Whether the step is 0 or one of every n."""
        return step == 0 or step % self.n == self.offset


@dataclass(frozen=True)
class PowersOfTwo:
    """Before training and after 1, 2, 4, 8, … steps: dense where training moves fast.

    Example:
        >>> from excite.probes import PowersOfTwo
        >>> [step for step in range(10) if PowersOfTwo().due(step)]
        [0, 1, 2, 4, 8]
    """

    def due(self, step: int) -> bool:
        """Whether the step is 0 or a power of two."""
        return step & (step - 1) == 0


class Budget:
    """As often as a fraction of the training time pays for: before training, after the first step, and then when it is paid for.

    All the time spent inside `watch.step` counts, and the first measurement before training. Probes that hold the same Budget are
    measured together.

    Args:
        fraction: Fraction of the training time, between 0 and 1.
        max_steps: Largest number of steps between two measurements, whatever they cost.

    Raises:
        InputError: If `fraction` is not between 0 and 1.

    Example:
        >>> from excite.probes import Budget
        >>> watch = excite.watch(model, example=x, every=Budget(0.03))  # at most 3 % of the training time
    """

    @renamed_keywords(share="fraction", most="max_steps")
    def __init__(self, fraction: float = 0.03, max_steps: int = 1000):
        if not is_number(fraction) or not 0 < fraction < 1:
            raise InputError(
                f"Budget: expected a fraction of the training time between 0 and 1, such as 0.03; got {shown(fraction)}"
            )
        self.fraction, self.max_steps = float(fraction), check_count(max_steps, "Budget: max_steps")
        self.next = 0
        self._taken: list[tuple[float, int]] = []  # seconds a step took, and how many steps took that, by interval
        self._last = (0, 0.0)  # steps and seconds of training when it was planned last

    share = renamed_attribute("share", "fraction")
    most = renamed_attribute("most", "max_steps")

    def due(self, step: int) -> bool:
        """Whether the planned step has been reached."""
        return step >= self.next

    def plan(self, step: int, steps: int, cost: float, spent: float, trained: float) -> int:
        """The next step to measure at.

        The next measurement is paid for once fraction · steps · typical ≥ spent + cost, nor does it come sooner than the
        steps in between pay for it. `typical` is the median time of a step, at most the mean: a slow first step
        (compiling, choosing kernels) pays for nothing.

        Args:
            step: Step of the last measurement.
            steps: Number of steps so far.
            cost: Seconds that the last measurement took.
            spent: Seconds that watching took so far.
            trained: Seconds that the steps themselves took so far.

        Returns:
            The step, after `step`.
        """
        if steps < 1 or trained <= 0:
            return step + 1
        typical = min(self._typical(steps, trained), trained / steps)
        wait = max(cost, spent + cost - self.fraction * typical * steps) / (self.fraction * typical)
        return step + max(1, math.ceil(min(wait, self.max_steps)))

    def _typical(self, steps: int, trained: float) -> float:
        """The lower median over steps; of an interval between two measurements only the mean is known."""
        if steps < self._last[0]:  # another training
            self._taken, self._last = [], (0, 0.0)
        new, seconds = steps - self._last[0], trained - self._last[1]
        self._last = (steps, trained)
        if new > 0 and seconds > 0:
            self._taken = [*self._taken[-_INTERVALS:], (seconds / new, new)]
        half, passed = sum(count for _, count in self._taken) / 2, 0
        for duration, count in sorted(self._taken):
            passed += count
            if passed >= half:
                return duration
        return trained / steps

    def __repr__(self) -> str:
        return f"Budget({self.fraction})"


class PaidSchedule(Budget):
    """As often as a fraction of the training time pays for the measurements of its own probes.

    First before training, which does not count, then each time once what they have cost so far and the next one are paid for. The next
    one is expected to cost as much as the last one, half as much after the first one, which fills caches. Unlike with `Budget` other
    probes do not count, and nothing is measured that is not paid for, however many steps pass. After t seconds of training fraction · t
    + advance · t / (t + 0.5) seconds may have been spent: with an advance short trainings are measured, too. Where less was spent, as
    after a first measurement that was slow, the rest is not spent at once: the next measurement follows after half of the steps that
    pay for it at the earliest.

    Args:
        fraction: Fraction of the training time, between 0 and 1.
        advance: Seconds that may be spent beyond it, early in the training.

    Raises:
        InputError: If `fraction` is not between 0 and 1, or `advance` is negative.

    Example:
        >>> with excite.watch(model, x, every={"rank": PaidSchedule(0.01)}) as watch:
        ...     watch.step(0.5)
    """

    def __init__(self, fraction: float = 0.03, advance: float = 0.0):
        super().__init__(fraction, max_steps=2**31 - 1)
        self.advance = check_number(advance, "PaidSchedule: advance", 0)
        self.spent = 0.0  # seconds of measurements during training
        self.cost = 0.0  # seconds of the last measurement

    def postpone(self, step: int, steps: int, trained: float) -> int:
        """The step itself if a measurement is paid for, else a later one.

        Args:
            step: Step at which a measurement is due.
            steps: Number of steps so far.
            trained: Seconds that they took.

        Returns:
            The step at which to ask again; `step` where the measurement may be made now.
        """
        if steps < 1 or trained <= 0:
            return step if step == 0 else step + 1
        missing = self.spent + self.cost - self.fraction * trained - self.advance * trained / (trained + _HALF)
        if missing <= 0:
            return step
        return step + min(max(1, math.ceil(missing / self._earned(steps, trained))), max(8, steps))

    def plan(self, step: int, steps: int, cost: float, spent: float, trained: float) -> int:
        """The step at which to ask again whether a measurement is paid for."""
        self.cost = cost if steps else cost / 2
        if steps < 1:
            return step + 1
        self.spent += cost
        apart = math.ceil(0.5 * cost / self._earned(steps, trained)) if trained > 0 else 1
        return max(step + max(1, apart), self.postpone(step, steps, trained))

    def _earned(self, steps: int, trained: float) -> float:
        """Seconds of measuring that one more step pays for."""
        return (self.fraction + self.advance * _HALF / (trained + _HALF) ** 2) * trained / steps

    def __repr__(self) -> str:
        return f"PaidSchedule({self.fraction}{f', advance={self.advance:g}' if self.advance else ''})"


def as_schedule(value: object, what: str = "every") -> Schedule:
    """A whole number n stands for Every(n)."""
    if is_whole(value):
        return Every(value)
    if not isinstance(value, type) and callable(getattr(value, "due", None)):
        return value  # type: ignore[return-value]
    raise InputError(
        f"{what}: expected a number of steps or a schedule such as Every(10), PowersOfTwo(), Budget(0.03); got {shown(value)}"
    )


def budgets(schedules: Sequence[Schedule]) -> list[Budget]:
    """The different budgets among them."""
    return list({id(budget): budget for budget in schedules if isinstance(budget, Budget)}.values())
