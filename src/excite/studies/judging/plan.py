"""How many seeds a claim needs, from the numbers of a few."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from excite._core.checks import check_number
from excite.errors import InputError
from excite.studies.judging.intervals import LEVEL
from excite.studies.judging.numbers import judge_again
from excite.studies.judging.verdicts import WHATEVER, Verdict
from excite.studies.study import Claim, Study

LARGEST = 1000  # numbers of seeds above are not searched


@dataclass(frozen=True)
class PlannedClaim:
    """How many seeds decide a claim.

    Args:
        verdict: The verdict with the seeds so far.
        seeds: How many seeds decide it with the requested power, if effect and spread stay as they are; None where no number does.
        word: "holds" or "fails": what it would be decided as; empty where it is not judged by an interval.
        reason: Why no number of seeds would decide it; empty where one does.
    """

    verdict: Verdict
    seeds: int | None
    word: str = ""
    reason: str = ""

    def __str__(self) -> str:
        words = self.reason if self.seeds is None else f"{self.seeds} seeds, as {self.word}"
        return f"{words}: {self.verdict.claim.text} [{self.verdict.word} with {self.verdict.seeds}]"


@dataclass(frozen=True)
class SeedPlan:
    """The numbers of seeds that the claims of a study need.

    Args:
        study: The study.
        scale: The scale of the numbers.
        file: Where the numbers stand.
        power: Probability with which each claim is decided with its number of seeds.
        claims: One entry per claim.
    """

    study: Study
    scale: str
    file: Path
    power: float
    claims: tuple[PlannedClaim, ...]

    def __str__(self) -> str:
        known = [claim.seeds for claim in self.claims if claim.seeds is not None]
        last = (
            f"{max(known)} seeds decide all claims that seeds can decide"
            if known
            else "no claim can be decided by seeds"
        )
        power = f"each with probability {self.power:.0%}, if effects and their spread stay as they are"
        return "\n".join([*map(str, self.claims), f"{last}, {power}"])


def plan_seeds(
    study: str | os.PathLike[str] | Study,
    file: str | os.PathLike[str] | None = None,
    scale: str | None = None,
    *,
    power: float = 0.8,
) -> SeedPlan:
    """Finds how many seeds each claim of a study needs, from the numbers of the seeds so far; nothing is run.

    The effect and its spread are taken to stay as they are. The level is 5 % divided by the number of claims that are judged by an
    interval: Holm's correction at its strictest. What the images add to the error stays, whatever the number of seeds. Where all seeds show
    the same number, the sign test counts them. Seeds that do not meet a claim's premise come on top, at the rate so far. Where half of a
    variant's networks are unreliable, no number of seeds decides.

    Args:
        study: The study, as for `run`.
        file: A numbers.json, or its folder; found as by `judge_again` by default.
        scale: With the default file: which scale in `runs/studies`.
        power: Probability with which a claim is to be decided.

    Returns:
        The number of seeds for each claim.

    Raises:
        InputError: If there are no numbers, or `power` is not between 0.05 and 1.

    Example:
        >>> plan = plan_seeds("boundaries", "runs/studies/boundaries-quick")  # doctest: +SKIP
        >>> plan.claims[0].seeds  # doctest: +SKIP
        6
    """
    power = check_number(power, "power")
    if not 0.05 < power < 1:
        raise InputError(f"power: expected a number between 0.05 and 1; got {power}")
    judged = judge_again(study, file, scale)
    return SeedPlan(judged.study, judged.scale, judged.file, power, _plan(judged.verdicts, power))


def _plan(verdicts: Sequence[Verdict], power: float) -> tuple[PlannedClaim, ...]:
    counted = sum(verdict.estimate is not None for verdict in verdicts)
    level = (1 - LEVEL) / max(counted, 1)
    return tuple(_plan_claim(verdict, level, power) for verdict in verdicts)


def _plan_claim(verdict: Verdict, level: float, power: float) -> PlannedClaim:
    estimate = verdict.estimate
    if estimate is None:
        reason = "its premise has to be met first" if verdict.word == "not tested" else "not a matter of seeds"
        return PlannedClaim(verdict, None, reason=reason)
    if math.isnan(estimate.error):
        return PlannedClaim(verdict, None, reason="the spread is not known: at least two seeds with finite effects")
    ends, word = _interval_ends(verdict.claim, estimate.mean)
    if any(end == estimate.mean for end in ends):
        return PlannedClaim(verdict, None, word, "the effect is on the threshold")
    if verdict.word == "undecided" and any(note.startswith(WHATEVER) for note in verdict.notes):
        return PlannedClaim(verdict, None, word, "more reliable numbers are needed")
    if estimate.error == 0 and not estimate.by_images:  # the sign test, p = 2^(1 − n)
        return PlannedClaim(verdict, _with_left_out(math.ceil(1 - math.log2(level)), verdict), word)
    images = estimate.by_images or 0.0
    spread = (estimate.error**2 - images) * verdict.seeds
    for seeds in range(2, LARGEST + 1):
        if _power(estimate.mean, spread, images, ends, seeds, level) >= power:
            return PlannedClaim(verdict, _with_left_out(seeds, verdict), word)
    limit = "more images are needed" if images > spread / LARGEST else f"more than {LARGEST} seeds"
    return PlannedClaim(verdict, None, word, limit)


def _with_left_out(seeds: int, verdict: Verdict) -> int:
    """How many seeds to run, so that the premise is met on so many of them, if it is met as often as so far."""
    return math.ceil(seeds * (verdict.seeds + verdict.left_out) / verdict.seeds)


def _interval_ends(claim: Claim, mean: float) -> tuple[tuple[float, ...], str]:
    """The thresholds that the interval must not reach, and what the claim is decided as."""
    if claim.within is not None:
        inside = abs(mean) < claim.within
        return (
            (-claim.within, claim.within) if inside else (math.copysign(claim.within, mean),)
        ), "holds" if inside else "fails"
    if claim.above is not None:
        return (claim.above,), "holds" if mean > claim.above else "fails"
    below = claim.below if claim.below is not None else 0.0
    return (below,), "holds" if mean < below else "fails"


def _power(mean: float, spread: float, images: float, ends: Sequence[float], seeds: int, level: float) -> float:
    """Probability that the interval of a number of seeds reaches none of the ends; two ends by Bonferroni's inequality.

    Args:
        mean: The effect.
        spread: Variance of the effect over seeds.
        images: Variance from the images.
        ends: Thresholds.
        seeds: The number of seeds.
        level: Two-sided level of the test.
    """
    by_seed = spread / seeds
    error = math.sqrt(by_seed + images)
    if error == 0:
        return 1.0
    # Welch and Satterthwaite: images are resampled so often that their part is known.
    freedom = min((by_seed + images) ** 2 / max(by_seed**2, 1e-300) * (seeds - 1), 1e6)
    critical = float(stats.t.ppf(1 - level / 2, freedom))
    distances = (abs(mean - end) / error for end in ends)
    # Farther than this nothing is missed, and the noncentral t distribution of SciPy has no value.
    return 1 - sum(float(stats.nct.cdf(critical, freedom, d)) for d in distances if d < 30 + 2 * critical)
