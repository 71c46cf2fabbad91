"""Whether a claim holds, from the numbers of several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from excite.studies.judging.intervals import LEVEL, Array, MeanEffect, holm, over_seeds, over_seeds_and_images
from excite.studies.study import Claim, VariantResult

Word = Literal["holds", "fails", "undecided", "exact", "not tested"]
WHATEVER = "Undecided, whatever the effect"  # beginning of the note on a claim whose numbers are not reliable enough


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim from the effects of several seeds.

    Args:
        claim: The claim.
        word: "holds", "fails" or "undecided"; "exact" for an identity that holds; "not tested" where its premise is never met.
        effect: The mean effect over seeds; of an identity or a universal claim, the effect nearest to a violation.
        low: Lower end of the 95 % interval of the mean effect; minus infinity where there is none.
        high: Upper end of that interval.
        seeds: The number of seeds.
        notes: What speaks against the numbers, and why a verdict is not what its interval says.
        p: Two-sided p-value of the effect against the threshold; None where the claim is not judged by an interval.
        adjusted: p after Holm's correction for the claims of the page.
        estimate: The mean effect and its standard error; None where the claim is not judged by an interval.
        left_out: The number of further seeds on which the claim's premise is not met.

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
    p: float | None = None
    adjusted: float | None = None
    estimate: MeanEffect | None = None
    left_out: int = 0

    @property
    def images(self) -> bool:
        """Whether the interval covers other images too, not only other seeds."""
        return self.estimate is not None and self.estimate.by_images is not None

    @property
    def wanted(self) -> str:
        """Which effect the claim asks for, such as "above 0"."""
        claim = self.claim
        if claim.within is not None:
            return f"within ±{claim.within:.3g}"
        every = "" if claim.kind == "effect" else " on every seed"
        return (f"above {claim.above:.3g}" if claim.above is not None else f"below {claim.below:.3g}") + every

    @property
    def numbers(self) -> str:
        """Effect, confidence interval and number of seeds in words."""
        seeds = f"{self.seeds} seed{'s' if self.seeds != 1 else ''}"
        if self.word == "not tested":
            return f"premise not met on {seeds}"
        if not math.isfinite(self.effect):
            return f"no finite effect, {seeds}"
        if self.claim.kind != "effect":
            return f"{'smallest' if self.claim.above is not None else 'largest'} {_signed(self.effect)}, {seeds}"
        covered = " over seeds and images" if self.images else ""
        interval = f"95 % interval{covered} {_signed(self.low)} to {_signed(self.high)}, " if self.seeds > 1 else ""
        if self.estimate is not None and self.estimate.error == 0 and math.isinf(self.low):
            interval = "the same on every seed, so that its spread is not known, "
        corrected = "" if self.adjusted is None or self.seeds < 2 else f", {_probability('Holm p', self.adjusted)}"
        return f"{_signed(self.effect)} ({interval}{seeds}{corrected})"

    def __str__(self) -> str:
        notes = f" {' '.join(self.notes)}" if self.notes else ""
        return f"{self.word}: {self.claim.text} [{self.claim.measure}: {self.numbers}, claimed {self.wanted}]{notes}"

    def plain(self) -> dict[str, Any]:
        """The entry of numbers.json: numbers that are not finite are None."""
        claim = self.claim
        numbers = {k: v if math.isfinite(v) else None for k in ("effect", "low", "high") for v in [getattr(self, k)]}
        return {
            "verdict": self.word, "text": claim.text, "source": claim.source, "measure": claim.measure, "arms": claim.variants,
            "kind": claim.kind, "above": claim.above, "below": claim.below, "within": claim.within, **numbers,
            "p": self.p, "holm": self.adjusted, "seeds": self.seeds, "images": self.images, "notes": self.notes,
        }  # fmt: skip


def judge_all(claims: Sequence[Claim], numbers: Sequence[VariantResult]) -> list[Verdict]:
    """The verdicts on the claims of a page, with Holm's correction; claims on variants that were not trained are left out.

    p-values of the claims that are judged by an interval are corrected for their number, so that with probability 95 %
    none of the decided ones is decided wrongly. A claim that only its own interval would decide becomes undecided.
    """
    verdicts = [verdict for claim in claims if (verdict := judge(claim, numbers)) is not None]
    counted = [at for at, verdict in enumerate(verdicts) if verdict.p is not None]
    for at, adjusted in zip(counted, holm([verdicts[at].p or 0.0 for at in counted])):
        verdict = verdicts[at]
        if verdict.word in ("holds", "fails") and adjusted > 1 - LEVEL:
            note = f"Alone this claim {verdict.word}; with Holm's correction for {len(counted)} claims it is undecided."
            verdict = replace(verdict, word="undecided", notes=(*verdict.notes, note))
        verdicts[at] = replace(verdict, adjusted=adjusted)
    return verdicts


def judge(claim: Claim, numbers: Sequence[VariantResult]) -> Verdict | None:
    """The verdict on one claim, without correction; None if one of its variants was not trained.

    Effects are paired by seed. With the interval [low, high] wholly on the claimed side of the threshold the claim holds,
    wholly on the other side it fails, else it is undecided; a claim of equivalence holds with the interval inside of ±`within`.
    An identity is exact and a universal claim holds if every seed is on the claimed side; one that is not makes them fail. Whatever
    the effects, a claim is undecided if the accuracy of a network is close to chance, or if the numbers of half of the networks of
    a variant are unreliable. Seeds that do not meet the claim's premise are left out. Where all seeds were measured on the same images
    and results have `resamples`, the interval covers other images too.
    """
    by_seed: dict[int, dict[str, VariantResult]] = {}
    for result in numbers:
        by_seed.setdefault(result.seed, {})[result.variant] = result
    pairs = [variants for variants in by_seed.values() if set(claim.variants) <= variants.keys()]
    if not pairs:
        return None
    tested = pairs if claim.premise is None else [variants for variants in pairs if claim.premise(variants)]
    if not tested:
        note = "Not tested: its premise is met on none of the seeds."
        return Verdict(claim, "not tested", math.nan, -math.inf, math.inf, len(pairs), (note,))
    effects = np.array([np.atleast_1d(claim.effect(variants)) for variants in tested], dtype=float)  # (seeds, rungs)
    verdict = (
        _on_every_seed(claim, effects)
        if claim.kind != "effect"
        else _by_interval(claim, effects, _resampled(claim, tested))
    )
    notes = [] if len(tested) == len(pairs) else [f"Its premise is met on {len(tested)} of {len(pairs)} seeds; the others are left out."]  # fmt: skip
    reasons = _reasons(claim, tested)
    if reasons and verdict.word != "undecided":
        notes.append(f"{WHATEVER} ({verdict.word}): {reasons[0]}")
    word: Word = "undecided" if reasons else verdict.word
    return replace(verdict, word=word, notes=(*notes, *_notes(claim, tested)), left_out=len(pairs) - len(tested))


def _on_every_seed(claim: Claim, effects: Array) -> Verdict:
    """Identities and universal claims: one counterexample is enough."""
    upwards = claim.above is not None
    threshold = claim.above if claim.above is not None else claim.below or 0.0
    finite = effects[np.isfinite(effects)]
    broken = bool((finite <= threshold).any() if upwards else (finite >= threshold).any())
    word: Word = "fails" if broken else "undecided" if finite.size < effects.size else "holds"
    if word == "holds" and claim.kind == "exact":
        word = "exact"
    worst = math.nan if not finite.size else float(finite.min() if upwards else finite.max())
    return Verdict(claim, word, worst, -math.inf, math.inf, len(effects))


def _resampled(claim: Claim, tested: Sequence[Mapping[str, VariantResult]]) -> Array | None:
    """(seeds, resamples, rungs): effects on resampled images; None where results have none, or not all of the same number."""
    draws = {
        len(values) for results in tested for name in claim.variants for values in results[name].resamples.values()
    }
    if len(draws) != 1:
        return None
    return np.array(
        [
            [
                np.atleast_1d(claim.effect({name: result.resampled(at) for name, result in results.items()}))
                for at in range(next(iter(draws)))
            ]
            for results in tested
        ],
        dtype=float,
    )


def _by_interval(claim: Claim, effects: Array, resampled: Array | None) -> Verdict:
    """Claims on means. With several rungs each has to lie on the claimed side; the least certain one is reported."""
    result = [
        _rung(claim, effects[:, at], None if resampled is None else resampled[:, :, at])
        for at in range(effects.shape[1])
    ]
    holding = [verdict for verdict in result if verdict.word == "holds"]
    if len(holding) < len(result):
        # One rung that fails is enough; with several to choose from its p-value is corrected.
        corrected = holm([verdict.p or 0.0 if verdict.word == "fails" else 1.0 for verdict in result])
        at = int(np.argmin(corrected))
        if corrected[at] <= 1 - LEVEL:
            return replace(result[at], p=corrected[at])
        weakest = max((v for v in result if v.word != "holds"), key=lambda verdict: verdict.p or 0.0)
        return replace(weakest, word="undecided")
    return max(result, key=lambda verdict: verdict.p or 0.0)


def _rung(claim: Claim, effects: Array, resampled: Array | None) -> Verdict:
    estimate = over_seeds(effects) if resampled is None else over_seeds_and_images(effects, resampled)
    low, high = estimate.interval()
    p, word = _p_value(claim, estimate), _word(claim, low, high)
    return Verdict(claim, word, estimate.mean, low, high, len(effects), p=p, estimate=estimate)


def _p_value(claim: Claim, estimate: MeanEffect) -> float:
    if claim.within is None:
        return estimate.p_value(claim.above if claim.above is not None else claim.below or 0.0)
    nearest = min((claim.within, -claim.within), key=lambda end: abs(estimate.mean - end))
    return estimate.p_value(nearest)  # of two one-sided tests, inside or outside, the less certain one


def _word(claim: Claim, low: float, high: float) -> Word:
    if claim.within is not None:
        inside, outside = -claim.within < low and high < claim.within, high < -claim.within or low > claim.within
        return "holds" if inside else "fails" if outside else "undecided"
    if claim.above is not None:
        return "holds" if low > claim.above else "fails" if high < claim.above else "undecided"
    below = claim.below if claim.below is not None else 0.0
    return "holds" if high < below else "fails" if low > below else "undecided"


def _reasons(claim: Claim, pairs: Sequence[Mapping[str, VariantResult]]) -> list[str]:
    """Why a claim cannot be decided, whatever its effects."""
    reasons = []
    for name in claim.variants:
        runs = [variants[name] for variants in pairs]
        if any(run.by_chance for run in runs):
            reasons.append(f"the accuracy of a network of {name} is close to chance.")
        doubtful = sum(bool(run.flags) for run in runs)
        if 2 * doubtful >= len(runs):
            reasons.append(
                f"the numbers of half or more of the networks of {name} are unreliable ({doubtful} of {len(runs)})."
            )
    return reasons


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


def _probability(name: str, p: float) -> str:
    return f"{name} < 0.001" if p < 0.001 else f"{name} = {p:.3f}" if p < 0.995 else f"{name} = 1"


def _signed(value: float) -> str:
    text = f"{value:+.4f}" if value == 0 or abs(value) >= 1e-3 or not math.isfinite(value) else f"{value:+.1e}"
    return text.replace("-", "−")
