"""Certified radii from interval and linear-relaxation bounds: the largest ball on which the bounds show one decision."""

from __future__ import annotations

import torch
from torch import Tensor

from excite.errors import ModelError
from excite.margin.certificates.linear_bounds import Method, Relaxation, make_ball
from excite.margin.certificates.tape import OperatorTape
from excite.margin.problem import Decision, MarginProblem

_ROUNDS = 14
_ROWS = 2**22  # numbers in one backward pass, at about 16 per input element


def relaxed_radii(problem: MarginProblem, upper: Tensor, method: Method, known: Tensor | None = None) -> Tensor:
    """(N,): how far each point is safe, by bisection between `known` and what a search found, `upper` (N,).

    Points that are misclassified or that cannot be perturbed keep 0. Every radius in the result was certified as such: bounds
    need not be monotone in the radius for that.
    """
    x = problem.x
    safe = (torch.zeros(len(x), dtype=torch.float64, device=x.device) if known is None else known.to(x.device)).clone()
    upper = torch.minimum(upper.to(x.device).double(), problem.constraint.max_radius.double())
    tape = make_tape(problem)
    for index in torch.nonzero(upper > 0)[:, 0].split(tape.rows):
        safe[index] = _bisect(tape, problem.rows(index), upper[index], safe[index], method)
    return safe


def make_tape(problem: MarginProblem) -> OperatorTape:
    """The operators of the model, for a number of rows that fits the size of the inputs."""
    rows = min(max(_ROWS // (16 * problem.x[0].numel()), 8), 256)
    tape = OperatorTape(problem.decision.model, problem.x, problem.decision.output, rows)
    check_rows(tape, problem)
    return tape


def check_rows(tape: OperatorTape, problem: MarginProblem) -> None:
    """Refuses a model whose rows depend on each other, and one that a tape does not reproduce."""
    x, decision = problem.x, problem.decision
    generator = torch.Generator().manual_seed(0)  # in another order, with other neighbours
    index = torch.randint(len(x), (tape.rows,), generator=generator).to(x.device)
    with torch.no_grad():
        expected = decision.outputs(x)[index]
        result = tape.values(x[index])[tape.output].reshape(expected.shape)
    scale = expected.abs().max().clamp_min(1e-6)
    if not bool(((result - expected).abs() <= 1e-3 * scale).all()):
        raise ModelError(
            "no bound known: the outputs of a point depend on the other points of the batch, or are not the same when computed again"
        )


def _bisect(tape: OperatorTape, problem: MarginProblem, upper: Tensor, safe: Tensor, method: Method) -> Tensor:
    count = len(problem)
    padded = torch.arange(tape.rows, device=upper.device).clamp(max=count - 1)
    problem, upper, safe = problem.rows(padded), upper[padded], safe[padded]
    high = upper
    for step in range(_ROUNDS):
        middle = high if step == 0 else torch.where(safe > 0, (safe + high) / 2, high / 3)
        ahead = smallest_lead(tape, problem, middle, method)
        certain = ahead > _rounding(tape, problem)
        safe, high = torch.where(certain, torch.maximum(middle, safe), safe), torch.where(certain, high, middle)
        if bool((high - safe <= 5e-3 * high).all()):
            break
    return safe[:count]


def smallest_lead(tape: OperatorTape, problem: MarginProblem, radius: Tensor, method: Method) -> Tensor:
    """(P,): a lower bound on the logit margin on the balls of `radius` (P,); P is the number of rows of the tape."""
    relaxed = Relaxation(tape, make_ball(problem, radius), method)
    decision, points = problem.decision, torch.arange(len(problem), device=radius.device)
    shape = tape.shapes[tape.output]
    with torch.no_grad():
        if decision.classes == 1:
            sign = torch.where(decision.labels == 1, 1.0, -1.0).double()
            result = relaxed.smallest(sign.reshape(-1, *[1] * (len(shape) - 1)).expand(shape), points)
            return result - sign * decision.threshold
        leads = []
        for other in range(1, decision.classes):
            leads.append(relaxed.smallest(difference(decision, other), points))
        return torch.stack(leads).amin(0)


def difference(decision: Decision, other: int) -> Tensor:
    """Coefficients (P, m) of f_label − f_j, where j is the `other`-th class after the label."""
    one_hot = torch.nn.functional.one_hot
    labels, m = decision.labels, decision.classes
    return (one_hot(labels, m) - one_hot((labels + other) % m, m)).double()


def _rounding(tape: OperatorTape, problem: MarginProblem) -> Tensor:
    """How far the outputs of the model, in its own precision, may be from those in float64."""
    with torch.no_grad():
        f = problem.decision.outputs(problem.x).double()
    size = f.abs() if f.dim() == 1 else f.abs().amax(1)
    types = {problem.x.dtype, *(p.dtype for p in problem.decision.model.parameters())}
    return 16 * torch.finfo(torch.float32 if torch.float32 in types else torch.float64).eps * size
