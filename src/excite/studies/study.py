"""What a study is: ways of doing something (arms), at two scales, and claims that comparing them can settle."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from excite.jobs.job import Work
from excite.studies.numbers import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Arm:
    """One way, and its settings; for a training those of a `TrainConfig` without seed and device."""

    name: str
    config: Mapping[str, Any]
    extra: bool = False  # not a curve of the papers' figure

    @property
    def slug(self) -> str:
        return re.sub(r"[^\w.]+", "-", self.name)


@dataclass(frozen=True)
class Claim:
    """A sentence, and a number per seed that has to lie above `above`, or below `below`, for it to hold.

    effect(arms) takes the numbers of one seed by arm, so that arms are compared in pairs: the same initial weights and
    the same order of the data wherever they agree in shape.
    """

    text: str
    source: str  # paper and figure or section
    measure: str  # what the effect is, in words
    arms: tuple[str, ...]
    effect: Callable[[Mapping[str, Numbers]], float]
    above: float | None = None
    below: float | None = None


def gap_claim(text: str, source: str, arm: str, than: str, *, wider: bool = False) -> Claim:
    """The gap between training and test curves is smaller in one arm than in another, or `wider`."""
    bounds = {"above": 0.0} if wider else {"below": 0.0}
    measure = f"gap of the curves, {arm} minus {than}"
    return Claim(text, source, measure, (than, arm), lambda n: n[arm].gap - n[than].gap, **bounds)


@dataclass(frozen=True)
class Ladder:
    """Arms from the simplest task to the most complex, and claims that a number grows along them."""

    arms: tuple[str, ...]
    rung: str  # what distinguishes one from the next, in words

    def each(self, text: str, source: str, name: str, words: str) -> Claim:
        """The number `name` grows from every arm to the next."""

        def effect(n: Mapping[str, Numbers]) -> float:
            logs = [math.log10(getattr(n[arm], name)) for arm in self.arms]
            return min(after - before for before, after in pairwise(logs))

        measure = f"{words}, log10 of the smallest ratio of a {self.rung} to the one below"
        return Claim(text, source, measure, self.arms, effect, above=0.0)

    def ends(self, text: str, source: str, name: str, words: str) -> Claim:
        """The number `name` is larger in the last arm than in the first."""
        low, high = self.arms[0], self.arms[-1]

        def effect(n: Mapping[str, Numbers]) -> float:
            return math.log10(getattr(n[high], name) / getattr(n[low], name))

        return Claim(text, source, f"{words}, log10 of the ratio of {high} to {low}", (low, high), effect, above=0.0)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a study is. Each kind of study adds what it needs."""

    name: str
    seeds: int
    words: str
    every_arm: bool = False  # whether extra arms belong to it without being asked for


class Method(Protocol):
    """How the arms of a study become numbers, and numbers a page."""

    @property
    def data(self) -> tuple[str, ...]:
        """Data sets to fetch first."""

    @property
    def columns(self) -> Mapping[str, tuple[str, str]]:
        """Of the table: heading and format, by name of the number."""

    @property
    def below_figure(self) -> str: ...
    @property
    def settings(self) -> tuple[str, ...]:
        """Lines for the page."""

    def work(self, study: str, arm: Arm, scale: Any, seed: int, folder: Path, device: str) -> Work: ...
    def check(self, work: Sequence[Work]) -> None:
        """Say what is missing (data), before anything starts."""

    def read(self, work: Work) -> tuple[Numbers, Any]:
        """The numbers of finished work, and what figures need beyond them."""

    def figures(
        self, study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
    ) -> dict[str, tuple[str, Figure]]:
        """By short name, a sentence and the figure; the first is the study's own. `details` by arm, one a seed."""

    def below_table(self, scale: Any) -> str: ...


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    figure: str  # which figure of which paper it remakes
    task: str  # on what
    method: Method
    scales: Mapping[str, Any]  # name -> Scale
    arms: Callable[[Any], list[Arm]]
    claims: Callable[[Any], list[Claim]]
    notes: tuple[str, ...] = ()
