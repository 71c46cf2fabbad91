"""Order of runs by robustness, where their accuracy is comparable and the difference exceeds its noise.

1. Runs that diverged, runs without margins, and runs that misclassify half of the test data or more, whose median margin is 0, have no
   rank.
2. Runs whose test accuracy is within 2 points of the most accurate one, or within the noise of both, are comparable. They are
   ordered by the median margin on test data. The others follow without a rank: more robust and less accurate is a trade-off.
3. A run shares the place of the one before it unless their medians differ by more than the noise, at the 5 % level over all
   pairs that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from excite.report.verdict.outcome import RunOutcome

POINTS_APART = 0.02  # of accuracy, that count as comparable
_LEVEL = 0.05


@dataclass(frozen=True)
class Ranked:
    """One run of a comparison.

    Attributes:
        outcome: What it achieved.
        rank: Its place, 1 for the most robust; the same for runs that cannot be told apart; None if it has none.
        text: Why it has this place.
    """

    outcome: RunOutcome
    rank: int | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON; what is not finite is None."""
        outcome = self.outcome
        if outcome.status == "diverged":  # what was measured before says nothing
            outcome = RunOutcome(outcome.label, outcome.status)
        median = outcome.medians.get("test")
        values = {
            "margin": outcome.margin, "low": None if median is None else median.low, "high": None if median is None else median.high,
            "accuracy": outcome.accuracy.get("test"), "gap": None if outcome.gap is None else outcome.gap.value, "chance": outcome.chance,
        }  # fmt: skip
        plain = {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}
        return {
            "run": outcome.label,
            "rank": self.rank,
            "margin_text": outcome.margin_text,
            "status": outcome.status,
            "text": self.text,
        } | plain


def rank(outcomes: Sequence[RunOutcome]) -> list[Ranked]:
    """Runs from the most to the least robust, then those that have no rank.

    Args:
        outcomes: What each run achieved.

    Returns:
        One entry per run.
    """
    diverged = [Ranked(ranked, None, ranked.reason or "diverged") for ranked in outcomes if ranked.status == "diverged"]
    sound = [ranked for ranked in outcomes if ranked.status != "diverged"]
    measured = sorted(
        (ranked for ranked in sound if ranked.margin is not None), key=lambda ranked: -(ranked.margin or 0.0)
    )
    unmeasured = [Ranked(ranked, None, "margins were not measured") for ranked in sound if ranked.margin is None]
    wrong = sorted(
        (outcome for outcome in measured if outcome.margin == 0), key=lambda outcome: -outcome.accuracy.get("test", 0.0)
    )
    inaccurate = [Ranked(outcome, None, "not accurate: most of the test data is misclassified") for outcome in wrong]
    measured = [outcome for outcome in measured if outcome.margin]
    best = max(measured, key=lambda ranked: ranked.accuracy.get("test", 0.0), default=None)
    comparable = [ranked for ranked in measured if best is not None and _as_accurate(ranked, best)]
    ranked = _places(comparable)
    further = [
        Ranked(ranked, None, _behind(ranked, best))
        for ranked in measured
        if ranked not in comparable and best is not None
    ]
    return [*ranked, *further, *inaccurate, *unmeasured, *diverged]


def _places(comparable: Sequence[RunOutcome]) -> list[Ranked]:
    count = len(comparable)
    pairs = max(1, count * (count - 1) // 2)
    limit = NormalDist().inv_cdf(1 - _LEVEL / (2 * pairs))
    result: list[Ranked] = []
    for i, outcome in enumerate(comparable):
        if i == 0:
            result.append(Ranked(outcome, 1, "largest margin on test data"))
            continue
        head = next(row for row in result if row.rank == result[-1].rank)  # the largest margin of the place before
        if _apart(head.outcome, outcome, limit):
            result.append(Ranked(outcome, i + 1, f"smaller margin than {head.outcome.label}"))
        else:
            result.append(Ranked(outcome, head.rank, f"undecided: within noise of {head.outcome.label}"))
    return result


def _apart(first: RunOutcome, second: RunOutcome, limit: float) -> bool:
    if first.norm != second.norm:
        return False
    a, b = first.medians["test"], second.medians["test"]
    error = math.hypot(a.error, b.error)
    return math.isfinite(error) and abs(a.value - b.value) > limit * error


def _as_accurate(run_outcome: RunOutcome, best: RunOutcome) -> bool:
    own, other = run_outcome.accuracy.get("test"), best.accuracy.get("test")
    if own is None or other is None:
        return True
    return other - own <= max(POINTS_APART, 1.96 * math.hypot(_error(run_outcome, own), _error(best, other)))


def _error(run_outcome: RunOutcome, accuracy: float) -> float:
    """Standard error of an accuracy; 0 if the number of points is not known."""
    n = run_outcome.points.get("test", 0)
    return math.sqrt(accuracy * (1 - accuracy) / n) if n else 0.0


def _behind(run_outcome: RunOutcome, best: RunOutcome) -> str:
    points = 100 * (best.accuracy.get("test", 0.0) - run_outcome.accuracy.get("test", 0.0))
    return f"not comparable: {points:.0f} points less accurate than {best.label}"
