"""Whether a claim holds, from the numbers of several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from excite.studies.study import Claim, VariantResult

Word = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """The mean effect over seeds with its 95 % t-interval, and what follows from it.

    Attributes:
        claim: The claim.
        word: The verdict: "holds", "fails" or "undecided".
        effect: Mean effect over seeds.
        low: Lower end of the interval.
        high: Upper end of the interval.
        seeds: Number of seeds.
        notes: Reservations about the numbers.

    Example:
        >>> claim = Claim("a is larger", "not in the papers", "a − b", ("a", "b"), lambda n: n["a"].v - n["b"].v, above=0.0)
        >>> Verdict(claim, "undecided", 0.5, -0.1, 1.1, seeds=3).wanted
        'above 0'
    """

    claim: Claim
    word: Word
    effect: float
    low: float
    high: float
    seeds: int
    notes: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        """Which effect the claim asks for, such as "above 0"."""
        return f"above {self.claim.above:.3g}" if self.claim.above is not None else f"below {self.claim.below:.3g}"

    @property
    def numbers(self) -> str:
        """Effect, confidence interval and number of seeds in words."""
        if not math.isfinite(self.effect):
            return f"no finite effect, {self.seeds} seeds"
        interval = f"95 % interval {_signed(self.low)} to {_signed(self.high)}, " if self.seeds > 1 else ""
        return f"{_signed(self.effect)} ({interval}{self.seeds} seed{'s' if self.seeds != 1 else ''})"

    def __str__(self) -> str:
        notes = f" {' '.join(self.notes)}" if self.notes else ""
        return f"{self.word}: {self.claim.text} [{self.claim.measure}: {self.numbers}, claimed {self.wanted}]{notes}"

    def plain(self) -> dict[str, Any]:
        """The entry of numbers.json: numbers that are not finite are None."""
        claim = self.claim
        numbers = {k: v if math.isfinite(v) else None for k in ("effect", "low", "high") for v in [getattr(self, k)]}
        return {
            "verdict": self.word, "text": claim.text, "source": claim.source, "measure": claim.measure, "arms": claim.variants,
            "above": claim.above, "below": claim.below, **numbers, "seeds": self.seeds, "notes": self.notes,
        }  # fmt: skip


def judge(claim: Claim, numbers: Sequence[VariantResult]) -> Verdict | None:
    """The verdict on a claim; None if one of its variants was not trained.

    Effects are paired by seed. With the interval [low, high] wholly on the claimed side of the threshold the claim
    holds, wholly on the other side it fails, else it is undecided. It is also undecided where a variant decides by chance:
    the margins of such a network say nothing.
    """
    by_seed: dict[int, dict[str, VariantResult]] = {}
    for found in numbers:
        by_seed.setdefault(found.seed, {})[found.variant] = found
    pairs = [variants for variants in by_seed.values() if set(claim.variants) <= variants.keys()]
    if not pairs:
        return None
    effects = np.array([claim.effect(variants) for variants in pairs])
    low, high = t_interval(effects)
    notes = _notes(claim, pairs)
    by_chance = any(variants[name].by_chance for variants in pairs for name in claim.variants)
    word: Word = "undecided" if by_chance else _word(claim, low, high)
    return Verdict(claim, word, float(effects.mean()), low, high, len(pairs), notes)


def t_interval(effects: npt.NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """mean ± t · s / √n with n − 1 degrees of freedom; unbounded for a single value or one that is not finite."""
    n = len(effects)
    if n < 2 or not np.isfinite(effects).all():
        return -math.inf, math.inf
    reach = float(stats.t.ppf((1 + level) / 2, n - 1) * effects.std(ddof=1) / math.sqrt(n))
    return float(effects.mean()) - reach, float(effects.mean()) + reach


def _word(claim: Claim, low: float, high: float) -> Word:
    if claim.above is not None:
        return "holds" if low > claim.above else "fails" if high < claim.above else "undecided"
    below = claim.below if claim.below is not None else 0.0
    return "holds" if high < below else "fails" if low > below else "undecided"


def _notes(claim: Claim, pairs: Sequence[Mapping[str, VariantResult]]) -> tuple[str, ...]:
    notes = []
    for name in claim.variants:
        runs = [variants[name] for variants in pairs]
        chance = sum(run.by_chance for run in runs)
        if chance:
            notes.append(f"{name}: {chance} of {len(runs)} networks have an accuracy close to chance.")
        doubtful = sum(bool(run.flags) for run in runs)
        if doubtful:
            notes.append(f"{name}: the numbers of {doubtful} of {len(runs)} networks are unreliable.")
    return tuple(notes)


def _signed(value: float) -> str:
    text = f"{value:+.4f}" if value == 0 or abs(value) >= 1e-3 or not math.isfinite(value) else f"{value:+.1e}"
    return text.replace("-", "−")
