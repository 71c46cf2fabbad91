"""Evidence that the search worked: an attack that fails is not a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from excite.margin.batches import BatchedSearch
from excite.margin.problem import AdversarialPerturbations, Decision
from excite.margin.reliability.gradient_free import gradient_free_search
from excite.margin.reliability.planted import PlantedTest, planted_test
from excite.margin.reliability.surrogates import DESCRIPTIONS, DRAWS, METHODS, MeanOutputs, Method, surrogate_search

_CHECKED = 64  # points given to the gradient-free search, or all of them if it wins too often
_QUERIES = 300  # forward passes it may use for each
_AGREE = 1.1  # two searches agree if the larger radius is at most this many times the smaller
_BEATEN = 0.99  # the gradient-free search has won if its radius is below this fraction of the other
_MISLED = 10.0
_PLANTED = 32  # points at which an adversarial example is planted
_TRIED = 16  # points at which other gradients are tried where there are signs of failure


@dataclass(frozen=True)
class Evidence:
    """Evidence of whether the search of `margins` worked: counts over the `attacked` points.

    Attributes:
        attacked: points that are classified correctly, so that there is something to search.
        flat: the gradient at the point is exactly zero, so that it shows no direction.
        lost: missed by gradients: no gradient search found an adversarial example, but moving straight to another point of
            the data, within the bounds, gives one.
        unbroken: no adversarial example found (censored).
        apart: the best two independent searches end more than 10 % apart; None if there was only one search.
        alone: they end more than a factor of 2 apart, so that only one of them worked; None if there was only one search.
        checked: points given to the gradient-free search.
        beaten: points where that found a perturbation more than 1 % smaller; `margins` then counts the smaller one.
        misled: the gradient at the point puts the boundary more than 10 times farther away than it is. Not a failure by
            itself, since the search does not stop there, but attacks that take small steps from the point do fail so.
        planted: points at which an adversarial example was planted to see whether the search finds it; None if the model has no
            last linear layer to plant it behind.
        unfound: planted examples that the search did not find.
        mended: gradients that found smaller perturbations where there were signs of failure; None where the model's own served.
        improved: points where those found a perturbation more than 1 % smaller.
        draws: passes whose mean output was searched, since the model is not deterministic; 1 if it is.

    Example:
        >>> evidence = excite.margins(model, x, y, options=SearchOptions(steps=20)).evidence
        >>> evidence.attacked >= evidence.unbroken
        True
    """

    attacked: int
    flat: int
    lost: int
    unbroken: int
    apart: int | None
    alone: int | None
    checked: int
    beaten: int
    misled: int
    planted: int | None = None
    unfound: int | None = None
    mended: str | None = None
    improved: int = 0
    draws: int = 1

    def flags(self) -> tuple[str, ...]:
        """Reasons not to trust the margins.

        A sign of failure counts against the whole model where it shows at more than one point in 20 (for `apart` three
        in 20), and at more than a single point unless there is no other.

        Returns:
            One sentence per reason; empty if there is none.
        """
        n = self.attacked
        signs = [
            (self.flat, n, 0.05, "the gradient is exactly zero"),
            (
                self.lost,
                n,
                0.05,
                "no gradient search found an adversarial example, but moving to another data point does",
            ),
            (self.unbroken, n, 0.05, "no adversarial example was found"),
            (self.apart or 0, n, 0.15, "independent searches end more than 10 % apart"),
            (self.alone or 0, n, 0.05, "only one of the independent searches came within twice the margin"),
            (self.beaten, self.checked, 0.05, "a search without gradients found a smaller perturbation"),
            (
                self.unfound or 0,
                self.planted or 0,
                0.05,
                "the search did not find an adversarial example that was planted",
            ),
        ]
        random = (f"the model is not deterministic: margins are those of the mean of {self.draws} outputs",)
        return (random if self.draws > 1 else ()) + tuple(
            f"at {count} of {total} points {description}"
            for count, total, fraction, description in signs
            if count and (count == total or count > max(1, fraction * total))
        )

    def to_dict(self) -> dict[str, Any]:
        """The counts by name, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        sentences = [f"a search without gradients was better at {self.beaten} of {self.checked} points"]
        if self.planted:
            sentences.append(f"planted examples were found at {self.planted - (self.unfound or 0)} of {self.planted}")
        if self.apart is not None:
            sentences.append(f"independent searches agree at {self.attacked - self.apart} of {self.attacked}")
        if self.misled > 0.05 * self.attacked:
            sentences.append(
                f"at {self.misled} the gradient puts the boundary more than 10 times too far away, which misleads weaker "
                "attacks"
            )
        return "; ".join(sentences)


def total_evidence(all_evidence: Sequence[Evidence]) -> Evidence:
    """The counts of several sets of points added up; one that was not made somewhere is None."""

    def total(name: str) -> int | None:
        counts = [getattr(evidence, name) for evidence in all_evidence]
        return None if None in counts else sum(counts)

    counts: dict[str, Any] = {f.name: total(f.name) for f in fields(Evidence) if f.name not in ("mended", "draws")}
    mended = sorted({evidence.mended for evidence in all_evidence if evidence.mended is not None})
    return Evidence(**counts, mended=", ".join(mended) or None, draws=max(evidence.draws for evidence in all_evidence))


def gather(searched: BatchedSearch, perturbations: AdversarialPerturbations) -> tuple[Evidence, Tensor]:
    """The evidence, and the points (N,) in doubt. Smaller perturbations that the check finds replace those in `perturbations`."""
    attacked, before = searched.correct, perturbations.radius.clone()
    checked, remaining = _sample(searched)
    _check(searched, perturbations, checked)
    if int((perturbations.radius < _BEATEN * before).sum()) > 0.05 * len(checked):
        _check(searched, perturbations, remaining)
        checked = torch.cat([checked, remaining])
    beaten = perturbations.radius < _BEATEN * before
    flat = attacked & torch.isinf(searched.estimate)
    unbroken = torch.isinf(perturbations.radius)
    apart, alone = None, torch.zeros_like(attacked)
    if len(searched.runs) > 1:
        first, second = torch.stack(searched.runs).topk(2, dim=0, largest=False).values
        apart = int((attacked & (second > _AGREE * first)).sum())
        alone = attacked & (second > 2 * first)
    evidence = Evidence(
        attacked=int(attacked.sum()),
        flat=int(flat.sum()),
        lost=int(searched.missed_by_gradients.sum()),
        unbroken=int(unbroken.sum()),
        apart=apart,
        alone=None if apart is None else int(alone.sum()),
        checked=len(checked),
        beaten=int(beaten.sum()),
        misled=int((attacked & (searched.estimate > _MISLED * perturbations.radius)).sum()),
        draws=DRAWS if isinstance(searched.problem.decision.model, MeanOutputs) else 1,
    )
    by_gradients = perturbations.radius.clone()
    if type(searched.problem.decision) is Decision:  # perturbations of layers have no such test
        test = _planted(searched, perturbations)
        evidence = evidence if test is None else replace(evidence, planted=test.planted, unfound=test.unfound)
        if evidence.flags():
            evidence = _mend(searched, perturbations, evidence)
    beaten |= perturbations.radius < _BEATEN * by_gradients  # by other gradients
    return evidence, flat | searched.missed_by_gradients | unbroken | beaten | alone


def _planted(searched: BatchedSearch, perturbations: AdversarialPerturbations) -> PlantedTest | None:
    index = _some(searched.correct & torch.isfinite(perturbations.radius) & (perturbations.radius > 0), _PLANTED)
    if not len(index):
        return None
    return planted_test(searched.problem.rows(index), perturbations.radius[index], searched.steps, searched.noise)


def _mend(searched: BatchedSearch, perturbations: AdversarialPerturbations, evidence: Evidence) -> Evidence:
    """Searches again with other gradients: with those that find the smallest perturbations at a few points, at all of them."""
    attacked = searched.correct & torch.isfinite(perturbations.radius)
    sample, before = _some(attacked, _TRIED), perturbations.radius.clone()
    factors: dict[Method, float] = {}
    for method in METHODS:
        attempt = AdversarialPerturbations(before.clone(), perturbations.d.clone())
        _search_again(searched, attempt, sample, method)
        factor = (attempt.radius / before)[sample]
        if int((factor < _BEATEN).sum()) > max(1, 0.1 * len(sample)):
            factors[method] = float(factor.log().mean())
        perturbations.update(sample, attempt.radius[sample], attempt.d[sample])
    if not factors:
        return evidence
    method = min(factors, key=lambda name: factors[name])
    for index in torch.nonzero(attacked)[:, 0].split(searched.batch):
        _search_again(searched, perturbations, index, method)
    improved = int((perturbations.radius < _BEATEN * before).sum())
    return replace(evidence, mended=DESCRIPTIONS[method], improved=improved)


def _search_again(
    searched: BatchedSearch, perturbations: AdversarialPerturbations, index: Tensor, method: Method
) -> None:
    if len(index):
        problem = searched.problem.rows(index)
        result = surrogate_search(problem, perturbations.radius[index], method, searched.steps, searched.noise)
        perturbations.update(index, result.radius, result.d)


def _some(mask: Tensor, count: int) -> Tensor:
    """About `count` of the points where `mask` holds, evenly taken."""
    index = torch.nonzero(mask)[:, 0]
    return index[:: max(1, -(-len(index) // count))]


def _check(searched: BatchedSearch, adversarial_perturbations: AdversarialPerturbations, points: Tensor) -> None:
    for index in points.split(searched.batch) if len(points) else ():
        problem = searched.problem.rows(index)
        start = searched.towards_points(problem, index)
        result = gradient_free_search(problem, start, searched.noise, _QUERIES)
        adversarial_perturbations.update(index, result.radius, result.d)


def _sample(searched: BatchedSearch) -> tuple[Tensor, Tensor]:
    """About `_CHECKED` of the attacked points, evenly taken, and the remaining ones."""
    index = torch.nonzero(searched.correct)[:, 0]
    stride = max(1, -(-len(index) // _CHECKED))
    taken = torch.arange(len(index), device=index.device) % stride == 0
    return index[taken], index[~taken]
