"""Bounds from a training with ½-dropout on the Lipschitz constant of a classifier, and about its generalization.

What training reveals, Theorem 3 with Lemmas 3 and 4. For outputs in [μ, 1 − μ], φ-steady training, every unit active on a
fraction of at least p_min of the training points, σ₁(W₁) ≤ β and slopes that change by no more than 1 + γ, the paper states

    λ ≤ λ_steady = (1 + γ) β φ log(Σ_l n_l) / (4 μ (1 − μ) p_min),
    |error on the sample − expected error| ≤ sqrt((4 log(2) N(𝒳; ℓ₂, r) + 2 log(1/δ)) / N),   r = min_i |f(x_i) − ½| / (2 λ).

The proof of the first line has gaps: Claim 1 takes a sum of Kronecker products for the product of sums (it fails for two
hidden layers of width 3), and the probability of seeing a basis is raised the wrong way. λ_steady is a heuristic. What holds
is the program of Theorem 2 with the recorded dropout patterns as columns: the gradient before the sigmoid is
linear in the Kronecker product of activations, whether dropout or a point selected them. In the second line the radius
depends on the sample, and the theorem it rests on wants a partition fixed before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from excite._core.checks import check_count, check_number, shown
from excite._core.compatibility import renamed_fields
from excite.bounds.bound import Assumption, Statement
from excite.bounds.relu_network import ReluNetwork, as_module, relu_network
from excite.bounds.trajectory.covering import Covering, covering_number
from excite.bounds.trajectory.patterns import Patterns, patterns, slopes, steepest
from excite.bounds.trajectory.regions import LIMIT, MAX_LIMIT, EmptyRegions, among, check_points, pursue_some
from excite.errors import InputError
from excite.lipschitz import largest

Where = Literal["end", "forward"]
_NAME = "What training reveals, Theorem 3"
_MAX_PATHS = 2_000_000


@renamed_fields(looked="measurements", least="min_output")
@dataclass(frozen=True)
class DropoutRun:
    """A training with ½-dropout: its weights, and what was recorded at its last |T| steps, from step ``tau`` on.

    Returned by `excite.train.train_with_dropout`.

    Args:
        pairs: Trained weights and biases in double precision; a sigmoid follows the last.
        where: Which activations dropout acts on.
        tau: First recorded step.
        seen: For each hidden layer the units that were active and not dropped, (T, n_l).
        phi: ‖∂ℓ/∂b₁‖ / |∂ℓ/∂f̃| at these steps (T,).
        plain: The same before the sigmoid, φ / (f̃(1 − f̃)) (T,).
        outputs: Outputs f̃ (T,).
        measurements: Number of these steps at which all training points were measured without dropout.
        min_output: Smallest of f and 1 − f in these measurements.
        beta: Largest σ₁(W₁).
        p_min: Smallest fraction of points that activate a unit.
        p_avg: Mean of that fraction over units and measurements.
        changed: Number of points whose activation pattern was not always the same.
        gamma: Largest ratio of the local Lipschitz constants of one point, minus 1.

    Example:
        >>> import torch
        >>> from excite.train import train_with_dropout
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> run = train_with_dropout(model, x, torch.tensor([0, 0, 1, 1]), steps=50, lr=0.1, tail=20)
        >>> run.tau, run.phi.shape
        (30, torch.Size([20]))
    """

    pairs: tuple[tuple[Tensor, Tensor], ...]
    where: Where
    tau: int
    seen: tuple[Tensor, ...]
    phi: Tensor
    plain: Tensor
    outputs: Tensor
    measurements: int
    min_output: float
    beta: float
    p_min: float
    p_avg: float
    changed: int
    gamma: float

    def module(self) -> nn.Sequential:
        """The trained network without dropout, with its sigmoid."""
        return as_module(self.pairs, sigmoid=True)


@dataclass(frozen=True)
class Generalization:
    """Lemma 4 with one Lipschitz constant.

    Args:
        constant: The Lipschitz constant.
        radius: r = min_i |f(x_i) − ½| / (2 · constant).
        covering: Covering number of the data at that radius.
        bounds: The bound on the difference of the errors with the covering number from below and from above. A bound of 1 or
            more is vacuous, and one that is so from below is vacuous whatever 𝒳 is.
    """

    constant: float
    radius: float
    covering: Covering
    bounds: tuple[float, float]

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing, whatever the set of inputs."""
        return self.bounds[0] >= 1


@dataclass(frozen=True)
class DropoutStatement(Statement):
    """Result of `dropout_generalization`: λ_steady and what follows from it, beside what holds.

    Args:
        name: Theorem and paper.
        steady: λ_steady, a heuristic.
        product: ¼ Π ‖W_l‖, which holds everywhere.
        found: Largest local constant found by search: the Lipschitz constant is at least that.
        program: Theorem 2 over the recorded dropout patterns, at the new points.
        lemma4: The generalization bound with each of the three constants.
        terms: The numbers these are made of.
        assumptions: The conditions of the theorem.

    Example:
        >>> import torch
        >>> from excite.bounds import dropout_generalization
        >>> from excite.train import train_with_dropout
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> run = train_with_dropout(model, x, torch.tensor([0, 0, 1, 1]), steps=50, lr=0.1, tail=20)
        >>> statement = dropout_generalization(run, x, x)
        >>> statement.found <= statement.product
        True
    """

    name: str
    steady: float
    product: float
    found: float
    program: EmptyRegions
    lemma4: Mapping[str, Generalization]
    terms: Mapping[str, Any]
    assumptions: tuple[Assumption, ...]

    def __str__(self) -> str:
        program = self.program
        bounded = program.values[program.reached]
        lines = [
            f"λ_steady {self.steady:.4g} (heuristic), product of norms {self.product:.4g}, largest constant found {self.found:.4g}; "
            f"program over dropout patterns: at most {float(bounded.max()) if len(bounded) else math.nan:.4g} at {program.share:.1%} of {len(program.values)} points",
            *(
                f"  with {name}: r = {statement.radius:.3g}, N between {statement.covering.at_least} and {statement.covering.at_most:.3g}, "
                f"error differs by at most {statement.bounds[0]:.3g} to {statement.bounds[1]:.3g}{' (vacuous)' if statement.vacuous else ''}"
                for name, statement in self.lemma4.items()
            ),
        ]
        return self.describe("\n".join(lines))


def dropout_generalization(
    run: DropoutRun,
    x: Tensor,
    new: Tensor,
    *,
    delta: float = 0.05,
    radius: float | None = None,
    limit: int = LIMIT,
    seed: int = 0,
) -> DropoutStatement:
    """Lipschitz constant and generalization of a classifier trained with ½-dropout (Theorem 3, What training reveals).

        λ_steady = (1 + γ) β φ log(Σ_l n_l) / (4 μ (1 − μ) p_min)
        |error on the sample − expected error| ≤ √((4 log(2) N(𝒳; ℓ₂, r) + 2 log(1/δ)) / N),   r = min_i |f(x_i) − ½| / (2 λ)

    The proof of the first line has gaps, so that λ_steady is a heuristic; constants that hold stand beside it.

    Args:
        run: The training, from `excite.train.train_with_dropout`.
        x: Training points (N, n).
        new: Points (M, n) of the same kind at which the statement is judged.
        delta: δ, the probability that the generalization bound fails.
        radius: How far around ``x`` and ``new`` the search for large local constants goes (infinity norm); a tenth of the
            largest distance from the mean by default.
        limit: Largest number of distinct dropout patterns in the program, as in `empty_region`.
        seed: Of the search.

    Returns:
        The statement. ``terms``: "phi", "mu", "gamma", "beta", "p_min", "p_avg", "units", "margin" and "steps needed"
        (p_avg Σ n_l / p_min², without the constant and the logarithms that the lemma leaves open).

    Raises:
        InputError: If ``run`` is not a `DropoutRun`, points do not fit it, or a number is out of range.

    Example:
        >>> import torch
        >>> from excite.bounds import dropout_generalization
        >>> from excite.train import train_with_dropout
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> run = train_with_dropout(model, x, torch.tensor([0, 0, 1, 1]), steps=200, lr=0.1, tail=100)
        >>> statement = dropout_generalization(run, x, x)
        >>> statement.found <= statement.product
        True
    """
    if not isinstance(run, DropoutRun):
        raise InputError(f"run: expected a DropoutRun, of excite.train.train_with_dropout; got {shown(run)}")
    if check_number(delta, "delta", 0, 1, above=True) == 1:
        raise InputError("delta: expected a number between 0 and 1; got 1")
    limit = check_count(limit, "limit", 1, MAX_LIMIT)
    network = relu_network(run.pairs, x, sigmoid=True)
    x, new = check_points(network, x, "training points"), check_points(network, new, "new points")
    around = torch.cat([x, new])
    largest_slope = largest(run.module(), around, _radius(around) if radius is None else radius, seed=seed).value
    return _theorem_3(run, network, x, new, largest_slope, delta, _program(run, network, x, new, limit))


def _theorem_3(
    run: DropoutRun, network: ReluNetwork, x: Tensor, new: Tensor, result: float, delta: float, program: EmptyRegions
) -> DropoutStatement:
    mu, steady, terms = _steady(run, network)
    product = 0.25 * math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in network.weights)
    away = float((network.signals(x)[-1].sigmoid() - 0.5).abs().min())
    constants = {
        "λ_steady (heuristic)": steady,
        "the product of norms (holds)": product,
        "the largest constant found (too small, if anything)": result,
    }
    lemma4 = {name: _lemma4(constant, away, torch.cat([x, new]), len(x), delta) for name, constant in constants.items()}
    checks = _assumptions(run, network, x, new, mu, terms["steps needed"])
    return DropoutStatement(_NAME, steady, product, result, program, lemma4, {**terms, "margin": away}, checks)


def _radius(points: Tensor) -> float:
    """A tenth of the largest distance from the mean."""
    return 0.1 * float(torch.linalg.vector_norm(points - points.mean(0), dim=1).max())


def _steady(run: DropoutRun, network: ReluNetwork) -> tuple[float, float, dict[str, Any]]:
    """μ, λ_steady, and the terms that it is made of."""
    units = sum(len(weight) for weight in network.weights[:-1])
    mu = min(run.min_output, float(torch.minimum(run.outputs, 1 - run.outputs).min()))
    phi = float(run.phi.max())
    bend = mu * (1 - mu) * run.p_min
    steady = (1 + run.gamma) * run.beta * phi * math.log(units) / (4 * bend) if bend > 0 else math.inf
    needed = run.p_avg / run.p_min**2 * units if run.p_min > 0 else math.inf
    terms = {"phi": phi, "mu": mu, "gamma": run.gamma, "beta": run.beta, "p_min": run.p_min, "p_avg": run.p_avg}
    return mu, steady, {**terms, "steps needed": needed, "units": units}


def _assumptions(
    run: DropoutRun, network: ReluNetwork, x: Tensor, new: Tensor, mu: float, needed: float
) -> tuple[Assumption, ...]:
    covered = _covered(patterns(network, x), patterns(network, new))
    detail = "" if covered is None else f"{covered:.1%} of the new points"
    return (
        Assumption(
            "(a) activation patterns at training points no longer change",
            run.changed == 0,
            f"{run.changed} of {len(x)} did, over {run.measurements} measurements; γ = {run.gamma:.3g}",
        ),
        Assumption(
            "(b) every path that a point activates is activated by a training point",
            None if covered is None else covered == 1,
            detail,
        ),
        Assumption("(c) σ₁(W₁) ≤ β", True, f"β = {run.beta:.3g}, measured"),
        Assumption("(d) outputs lie in [μ, 1 − μ]", mu > 0, f"μ = {mu:.3g}, measured"),
        Assumption("every unit is active at some training point", run.p_min > 0, f"p_min = {run.p_min:.3g}"),
        Assumption(
            "steps enough", len(run.phi) >= needed, f"{len(run.phi)} steps, p_avg Σ n_l / p_min² = {needed:.3g}"
        ),
        Assumption("the recorded dropout patterns contain a basis (Lemma 3): its proof has gaps", None),
        Assumption("the cover of Lemma 4 is fixed before the sample is drawn: its radius depends on it", None),
    )


def _program(run: DropoutRun, network: ReluNetwork, x: Tensor, new: Tensor, limit: int) -> EmptyRegions:
    """¼ (1 + γ) β min Σ |a_k| φ_k / (f̃_k (1 − f̃_k)) over the recorded patterns, γ such that it holds at the last weights."""
    training_patterns: Patterns = list(run.seen)
    _, gradient_norms = slopes(network, training_patterns)
    ratio = torch.where(gradient_norms > 0, gradient_norms / (run.beta * run.plain), 0.0)
    gamma = max(0.0, float(ratio.max()) - 1)
    holds = math.isfinite(gamma)
    cost = 0.25 * (1 + (gamma if holds else 0.0)) * run.beta * run.plain
    at_new = patterns(network, new)
    solution, num_unresolved = pursue_some(training_patterns, cost, at_new, limit, 0.25 * steepest(network))
    terms = {
        "gamma": gamma,
        "patterns": solution.columns,
        "rank": solution.rank,
        "programs": solution.programs,
        **num_unresolved,
    }
    return EmptyRegions(
        "What training reveals, Theorem 2, over dropout patterns",
        torch.from_numpy(solution.values),
        torch.from_numpy(solution.reached),
        ~among(patterns(network, x), at_new),
        terms,
        (
            Assumption(
                "slopes of the recorded patterns are at most (1 + γ) β φ at the last weights", holds, f"γ = {gamma:.3g}"
            ),
        ),
    )


def _covered(training: Patterns, new: Patterns) -> float | None:
    """The fraction of points all of whose paths, one active unit per layer, are paths of some training point; None if too many."""
    if math.prod(layer.shape[1] for layer in training) > _MAX_PATHS:
        return None
    union = _paths(training, slice(None)).any(0)
    inside = [not bool((_paths(new, slice(i, i + 1))[0] & ~union).any()) for i in range(len(new[0]))]
    return sum(inside) / len(inside) if inside else 1.0


def _paths(active: Patterns, rows: slice) -> Tensor:
    """(N, Π n_l)."""
    paths = active[0][rows]
    for layer in active[1:]:
        paths = (layer[rows][:, :, None] & paths[:, None, :]).flatten(1)
    return paths


def _lemma4(constant: float, away: float, sample: Tensor, count: int, delta: float) -> Generalization:
    radius = away / (2 * constant) if constant > 0 else math.inf
    covering = covering_number(sample, radius)
    low, high = (
        math.sqrt((4 * math.log(2) * number + 2 * math.log(1 / delta)) / count)
        for number in (covering.at_least, covering.at_most)
    )
    return Generalization(constant, radius, covering, (low, high))
