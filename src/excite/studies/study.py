"""What a study is: ways of training to compare (arms), at two scales, and claims that the comparison can settle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from excite.studies.numbers import Numbers


@dataclass(frozen=True)
class Arm:
    """One way of training: the settings of a `TrainConfig` without seed and device."""

    name: str
    config: Mapping[str, Any]
    extra: bool = False  # not a curve of the papers' figure


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
class Scale:
    """How large a study is. Sizes are training and test images; `points` of each have their margins measured."""

    name: str
    train: int | None  # None: all there are
    test: int | None
    epochs: int
    batch: int
    lr: float
    seeds: int
    points: int
    sizes: Mapping[str, int]  # arms with other numbers of training images
    every_arm: bool  # whether extra arms belong to it without being asked for
    words: str


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    figure: str  # which figure of which paper it remakes
    scales: Mapping[str, Scale]
    arms: Callable[[Scale], list[Arm]]
    claims: Callable[[Scale], list[Claim]]
    notes: tuple[str, ...] = ()
