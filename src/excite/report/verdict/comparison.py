"""Verdict on the runs of a report: sentences computed from the measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from excite.margin.gap import common_grid, frequencies, ks_distance
from excite.report.collect import Values, VariantRuns
from excite.report.curves import expected_gap
from excite.report.verdict.outcome import hardly
from excite.report.verdict.runs import classes


@dataclass(frozen=True)
class Comparison:
    """Gap of one variant minus gap of another, with a 95 % bootstrap interval."""

    variant: str
    against: str
    difference: float
    low: float
    high: float
    runs: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        variants = f"{self.variant} against {self.against}"
        resampled = "runs and points" if self.runs > 1 else "points only, since there is one run each"
        interval = f"95 % interval {_signed(self.low)} to {_signed(self.high)}, resampling {resampled}"
        if not self.decided:
            return f"{variants}: undecided. The gap differs by {_signed(self.difference)} ({interval})."
        direction = "smaller" if self.difference < 0 else "larger"
        return f"{variants}: the gap is {direction}, by {abs(self.difference):.3f} ({interval})."


def compare(variant: VariantRuns, against: VariantRuns, resamples: int = 1000, seed: int = 0) -> Comparison | None:
    """Compares the gaps of two variants, with a bootstrap interval; None if no seed is common to both.

    Runs are paired by their seed (the same data and initial weights); others are left out.

    A bootstrap on two levels: pairs of runs are drawn with replacement, then the points of each. Resampling adds to a gap,
    and more to a small one than to a large one; the basic interval, 2·estimate − quantiles, takes that off again. On
    synthetic variants with equal gaps it decides for a difference in 3 to 5 % of cases, while plain quantiles do in 0 to 2 %
    and miss twice as many real differences (`tests/report/verdict/test_comparison.py`, slow tier).
    """
    first, second = variant.pairs(), against.pairs()
    common = [key for key in first if key in second]
    pairs, other_pairs = [first[key] for key in common], [second[key] for key in common]
    runs = len(common)
    if not runs:
        return None
    rng = np.random.default_rng(seed)
    sides = _Resampled(pairs), _Resampled(other_pairs)
    differences = np.empty(resamples)
    for i in range(resamples):
        chosen = rng.integers(runs, size=runs) if runs > 1 else np.zeros(1, np.int64)
        differences[i] = sides[0].gap(chosen, rng) - sides[1].gap(chosen, rng)
    estimate = sides[0].estimate - sides[1].estimate
    high, low = 2 * estimate - np.quantile(differences, [0.025, 0.975])
    return Comparison(variant.name, against.name, estimate, float(low), float(high), runs)


class _Resampled:
    """Gaps of resampled runs and points. Values become places on one sorted grid, so that a gap is a difference of counts."""

    def __init__(self, pairs: Sequence[tuple[Values, Values]]):
        grid = common_grid(values for pair in pairs for values in pair)
        self.size = len(grid)
        self.places = [tuple(np.searchsorted(grid, values) for values in pair) for pair in pairs]
        self.estimate = self._gap(self.places)

    def gap(self, chosen: npt.NDArray[np.int64], rng: np.random.Generator) -> float:
        """The gap with the runs `chosen`, the points of each drawn with replacement."""
        return self._gap([tuple(p[rng.integers(len(p), size=len(p))] for p in self.places[r]) for r in chosen])

    def _gap(self, places: Sequence[tuple[npt.NDArray[np.int64], ...]]) -> float:
        train, test = (np.concatenate(values) for values in zip(*places))
        return ks_distance(*(frequencies(values, self.size) for values in (train, test)))


def verdict(variants: Sequence[VariantRuns]) -> list[str]:
    """Sentences on gaps (compared with the first variant and the previous one), accuracy, and how far margins can be trusted."""
    sentences: list[str] = []
    measured = {variant.name: gap for variant in variants if (gap := variant.gap()) is not None}
    if measured:
        listed = ", ".join(f"{name} {gap:.3f}" for name, gap in sorted(measured.items(), key=lambda item: item[1]))
        floor = max(
            expected_gap(*(sum(map(len, group)) for group in zip(*variant.pairs().values())))
            for variant in variants
            if variant.pairs()
        )
        order = ", smallest first" if len(measured) > 1 else ""
        sentences.append(
            f"Gap between training and test margins{order}: {listed}. "
            f"Two sets of this size from one distribution would show about {floor:.3f}."
        )
    compared = [variant for variant in variants if variant.pairs()]
    for i, variant in enumerate(compared):
        references = {0, i - 1} if i else set()
        sentences += [str(result) for j in sorted(references) if (result := compare(variant, compared[j])) is not None]
    sentences += [sentence for variant in variants for sentence in _warnings(variant)]
    if not measured:
        sentences.append(
            "No margins are stored in these runs: none were measured at their end, or later by excite margins."
        )
    return sentences


def _warnings(variant: VariantRuns) -> list[str]:
    result = []
    accuracies = variant.accuracies("test")
    known = classes(variant.runs[0].wiring)
    if accuracies and known and min(accuracies) < hardly(known):
        result.append(
            f"{variant.name}: test accuracy is {min(accuracies):.0%}: the network is hardly better than chance, "
            "so its margins say nothing about robustness."
        )
    margins = [m for run in variant.runs for m in run.margins.values()]
    doubtful = [m for m in margins if m.flags]
    if doubtful:
        reasons = "; ".join(dict.fromkeys(flag for m in doubtful for flag in m.flags))
        result.append(
            f"{variant.name}: {len(doubtful)} of {len(margins)} measurements of margins are unreliable, margins may be "
            f"smaller than shown: {reasons}."
        )
    if any(m.evidence is None for m in margins):
        result.append(f"{variant.name}: margins were measured without evidence that the search converged.")
    failed = [run for run in variant.runs if run.status == "failed"]
    result += [f"{variant.name}: the run {run.path.name} failed: {run.reason}." for run in failed]
    return result


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−") if math.isfinite(value) else "unbounded"
