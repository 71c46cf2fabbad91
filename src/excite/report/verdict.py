"""Verdicts in words, computed from the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from excite.report.collect import Arm


@dataclass(frozen=True)
class Comparison:
    """Gap of one arm minus gap of another: mean over paired runs, with a 95 % interval over them."""

    arm: str
    against: str
    difference: float
    low: float
    high: float
    pairs: int

    @property
    def decided(self) -> bool:
        return self.pairs > 1 and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        where = f"{self.arm} against {self.against}"
        if self.pairs < 2:
            return (
                f"{where}: the gap is {_signed(self.difference)} in one run each; one run cannot tell it from chance, "
                "so this is undecided."
            )
        interval = f"95 % interval {_signed(self.low)} to {_signed(self.high)} over {self.pairs} pairs of runs"
        if not self.decided:
            return f"{where}: undecided. The gap differs by {_signed(self.difference)} ({interval}, which includes 0)."
        word = "smaller" if self.difference < 0 else "larger"
        return f"{where}: the gap is {word}, by {abs(self.difference):.3f} ({interval})."


def compare(arm: Arm, against: Arm) -> Comparison | None:
    """Paired by position (the same seed and data); the interval is Student's t over the pairs."""
    ours, theirs = arm.gaps(), against.gaps()
    pairs = min(len(ours), len(theirs))
    if not pairs:
        return None
    differences = np.array(ours[:pairs]) - np.array(theirs[:pairs])
    mean = float(differences.mean())
    reach = math.inf
    if pairs > 1:
        reach = float(student.ppf(0.975, pairs - 1) * differences.std(ddof=1) / math.sqrt(pairs))
    return Comparison(arm.name, against.name, mean, mean - reach, mean + reach, pairs)


def verdict(arms: Sequence[Arm]) -> list[str]:
    """Sentences on what the runs show: gaps compared with the first arm and the one before, accuracy, trust."""
    sentences: list[str] = []
    measured = [arm for arm in arms if arm.gaps()]
    if len(measured) > 1:
        ranked = sorted(measured, key=lambda arm: float(np.mean(arm.gaps())))
        listed = ", ".join(f"{arm.name} {np.mean(arm.gaps()):.3f}" for arm in ranked)
        sentences.append(f"Gap between training and test margins, smallest first: {listed}.")
    for i, arm in enumerate(measured):
        others = {0, i - 1} if i else set()
        sentences += [str(found) for j in sorted(others) if (found := compare(arm, measured[j])) is not None]
    sentences += [sentence for arm in arms for sentence in _warnings(arm)]
    if not measured:
        sentences.append("No margins were measured in these runs: `excite margins RUN` measures and keeps them.")
    return sentences


def _warnings(arm: Arm) -> list[str]:
    found = []
    accuracies = arm.accuracies("test")
    if accuracies and min(accuracies) < 0.6:
        found.append(
            f"{arm.name}: test accuracy is {min(accuracies):.0%}: this network decides hardly better than by chance, "
            "so its margins say nothing about robustness."
        )
    margins = [m for run in arm.runs for m in run.margins.values()]
    doubtful = [m for m in margins if not m.trusted]
    if doubtful:
        found.append(
            f"{arm.name}: the search for margins did not work as it should in {len(doubtful)} of {len(margins)} "
            f"measurements, so margins may be smaller than shown. {'; '.join(dict.fromkeys(f for m in doubtful for f in m.flags))}"
        )
    broken = [run for run in arm.runs if run.status == "failed"]
    found += [f"{arm.name}: the run {run.path.name} failed: {run.reason}." for run in broken]
    return found


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−") if math.isfinite(value) else "unbounded"
