"""The certified lower bounds of one call of `margins`, by the kind that the options ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from excite.errors import ModelError
from excite.margin.batches import BatchedSearch
from excite.margin.certificates.lipschitz_radii import certified_radii, check_against, known_constant
from excite.margin.inputs import SearchOptions
from excite.margin.problem import AdversarialPerturbations, MarginProblem
from excite.margin.reliability.surrogates import MeanOutputs
from excite.margin.result import Margins
from excite.margin.search import to_boundary

if TYPE_CHECKING:
    from excite.margin.certificates.linear_bounds import Method

_NAMES = {"interval": "interval bounds of the network", "linear": "linear relaxation of the network"}
RANDOM_MODEL = "no bound holds for a model that is not deterministic"


def certified(result: Margins, problem: MarginProblem, f: Tensor, options: SearchOptions) -> Margins:
    """The margins with lower bounds, and where these come from.

    Raises:
        ModelError: if a kind was asked for by name that the model does not have, with the operator that is in the way.
        InputError: if the constant of the user's is too small.
    """
    if isinstance(problem.decision.model, MeanOutputs):
        return replace(result, certified_why=RANDOM_MODEL)
    result = _by_constant(result, problem, f, options)
    if options.certify == "lipschitz" and result.certified is None:
        raise ModelError(result.certified_why)
    if options.certify not in ("interval", "linear"):
        return result
    from excite.margin.certificates.relaxed_radii import relaxed_radii

    method: Method = "interval" if options.certify == "interval" else "linear"
    radii = relaxed_radii(problem, result.values, method, result.certified).cpu()
    return replace(result, certified=torch.minimum(radii, result.values), certified_why=_NAMES[method])


def exact_margins(
    search: BatchedSearch,
    perturbations: AdversarialPerturbations,
    seconds: float,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """(N,): lower bounds from mixed-integer programs, exact where there was time. Smaller perturbations replace those in `perturbations`."""
    from excite.margin.certificates.exact import solve_exactly

    lower, solutions = solve_exactly(search.problem, perturbations, seconds, progress)
    # A solution lies on the boundary up to the solver's tolerance: a little beyond it, then back to the boundary.
    for more in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        beyond = AdversarialPerturbations(
            solutions.radius.clone(), search.problem.constraint.clip(solutions.d * (1 + more))
        )
        beyond.radius = search.problem.constraint.length(beyond.d)
        adversarial = search.problem.decision.evaluate(search.problem.x + beyond.d)[1] & torch.isfinite(
            solutions.radius
        )
        index = torch.nonzero(adversarial)[:, 0]
        perturbations.update(index, beyond.radius[index], beyond.d[index])
    shorter = to_boundary(search.problem, perturbations)
    perturbations.update(
        torch.arange(len(perturbations.radius), device=perturbations.radius.device), shorter.radius, shorter.d
    )
    search.verify(perturbations)
    return lower


def _by_constant(result: Margins, problem: MarginProblem, f: Tensor, options: SearchOptions) -> Margins:
    decision, lipschitz = problem.decision, options.lipschitz
    if lipschitz is None:
        constant, why = known_constant(decision.model, problem.x[:2], result.norm, decision.output)
    else:
        constant, why = float(lipschitz), f"Lipschitz constant {float(lipschitz):.4g} given"
    if constant is None:
        return replace(result, certified_why=why)
    radii = certified_radii(f.double(), decision.labels, decision.threshold, constant, result.norm).cpu()
    if lipschitz is not None:
        check_against(radii, result.values, constant)
    # Both sides are computed in floating point: where the bound is tight they may cross by rounding.
    return replace(result, certified=torch.minimum(radii, result.values), certified_why=why)
