"""Exact margins of small piecewise-linear networks in the norms "inf" and "1", by mixed-integer programs (Tjeng et al., 2019).

A program per point and class: minimize ‖x' − x‖ subject to f_label(x') ≤ f_other(x'), with one binary variable for each unit that
may be on either side of its kink within the ball of the perturbation that a search found. The solver is scipy's HiGHS. It returns a
solution and a lower bound; where it runs out of time the bound is smaller, and still one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from excite.errors import InputError, ModelError
from excite.margin.certificates.linear_bounds import Relaxation, make_ball
from excite.margin.certificates.relaxed_radii import make_tape
from excite.margin.certificates.tape import OperatorTape, TapeStep
from excite.margin.problem import AdversarialPerturbations, MarginProblem

MAX_UNITS = 5000
_TOLERANCE = 1e-6  # of the solver: constraints hold up to it, relative to values of size one


@dataclass
class Program:
    """A mixed-integer linear program that grows row by row: low ≤ A v ≤ high."""

    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variables(self, low: Any, high: Any, binary: bool = False) -> np.ndarray:
        """Numbers of new variables between `low` and `high`, flat arrays of the same length."""
        low, high = np.asarray(low, float).ravel(), np.asarray(high, float).ravel()
        first = len(self.lowest)
        self.lowest += low.tolist()
        self.highest += high.tolist()
        self.integral += [int(binary)] * len(low)
        return np.arange(first, first + len(low))

    def row(self, columns: Any, entries: Any, low: float, high: float) -> None:
        """One constraint."""
        columns, entries = np.atleast_1d(columns), np.atleast_1d(np.asarray(entries, float))
        retained = entries != 0
        self.rows += [len(self.low)] * int(retained.sum())
        self.columns += columns[retained].tolist()
        self.entries += entries[retained].tolist()
        self.low.append(low)
        self.high.append(high)

    def solve(
        self, cost: np.ndarray, seconds: float, also: tuple[np.ndarray, float], like: np.ndarray | None = None
    ) -> tuple[float, np.ndarray | None]:
        """A lower bound on the smallest cost, +inf if there is no solution, and the best solution.

        `also` is (a, b) with a · v ≤ b. With `like` the whole numbers are those of that solution.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array, vstack

        matrix = csr_array((self.entries, (self.rows, self.columns)), (len(self.low), len(self.lowest)))
        matrix = vstack([matrix, csr_array(also[0][None])])
        constraints = LinearConstraint(matrix, [*self.low, -np.inf], [*self.high, also[1]])
        integral, low, high = np.array(self.integral), np.array(self.lowest), np.array(self.highest)
        if like is not None:
            low, high = (np.where(integral == 1, np.round(like), bound) for bound in (low, high))
        result = milp(
            cost, integrality=integral, bounds=Bounds(low, high), constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )  # fmt: skip
        if result.status == 2:
            return math.inf, None
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else (result.fun if result.success else 0.0)
        return max(0.0, float(bound)), result.x


def solve_exactly(
    problem: MarginProblem, perturbations: AdversarialPerturbations, seconds: float, progress: Any = None
) -> tuple[Tensor, AdversarialPerturbations]:
    """Lower bounds (N,) and the perturbations of the solutions, which need not be adversarial by rounding.

    Args:
        problem: the points and decisions, in the norm "inf" or "1".
        perturbations: perturbations that a search found; they bound the programs. Points without any are refused.
        seconds: time limit of one program.
        progress: called as progress(done, total).

    Raises:
        InputError: if the norm is "2".
        ModelError: if the network is not piecewise linear, by operator, or has too many units.
    """
    if problem.constraint.norm == "2":
        raise InputError(
            "certify='exact' is for the norms 'inf' and '1', which have linear programs; got '2': certify='linear'"
        )
    tape = make_tape(problem)
    _check_tape(tape)
    lower = torch.zeros(len(problem), dtype=torch.float64)
    solutions = AdversarialPerturbations(
        torch.full_like(perturbations.radius, math.inf), torch.zeros_like(perturbations.d)
    )
    unbounded = problem.constraint.low is None
    radius = torch.minimum(perturbations.radius, problem.constraint.max_radius)
    for i in torch.nonzero(radius > 0)[:, 0].tolist():
        at = torch.tensor([i], device=radius.device)
        lower[i], d = _point(
            tape,
            problem.rows(at),
            float(radius[i]),
            bool(torch.isfinite(perturbations.radius[i])) or unbounded,
            seconds,
        )
        if d is not None:
            solutions.d[i] = d.to(solutions.d)
            solutions.radius[i] = problem.constraint.length(solutions.d[i : i + 1])[0]
        if progress is not None:
            progress(i + 1, len(problem))
    return lower, solutions


def _check_tape(tape: OperatorTape) -> None:
    units = 0
    for step in tape.steps.values():
        if step.pool or (step.activation is not None and step.activation.kinks is None):
            raise ModelError(
                f"no exact margin known for {step.name}: it is not among the piecewise-linear activations; certify='linear'"
            )
        if step.activation is not None:
            units += math.prod(tape.shapes[step.node][1:])
    if units > MAX_UNITS:
        raise ModelError(f"certify='exact': expected at most {MAX_UNITS} units; got {units}: certify='linear'")


def _point(
    tape: OperatorTape, problem: MarginProblem, radius: float, reached: bool, seconds: float
) -> tuple[float, Tensor | None]:
    """The lower bound of one point, and the perturbation of the best solution; `reached`: one of `radius` was found."""
    # A little more than was found: the solver's tolerances must not cut the solution off.
    padded = problem.rows(torch.zeros(tape.rows, dtype=torch.long, device=problem.x.device))
    ball = make_ball(padded, torch.full((tape.rows,), radius * (1 + 1e-4), device=problem.x.device))
    relaxed = Relaxation(tape, ball, "linear")
    program = Program()
    columns_of: dict[Node, np.ndarray] = {}
    x = problem.x[0].double().flatten().cpu().numpy()
    low, high = (bound[0].flatten().cpu().numpy() for bound in (ball.low, ball.high))
    columns_of[tape.input] = program.variables(low, high)
    size, cost = _distance(program, columns_of[tape.input], x, problem.constraint.norm, radius * (1 + 1e-4))
    for step in tape.steps.values():
        if step.activation is not None:
            columns_of[step.node] = _add_units(program, tape, step, relaxed, columns_of)
    best, solution = math.inf, None
    cost = np.pad(cost, (0, len(program.lowest) - len(cost)))
    for row, constant in _targets(tape, problem, columns_of, len(program.lowest)):
        bound, v = program.solve(cost, seconds, (row, -constant))
        best = min(best, bound)
        if v is not None and (solution is None or v[size].sum() < solution[0]):
            # beyond the boundary by more than rounding, on the same linear piece if that reaches so far
            beyond = program.solve(cost, seconds, (row, -constant - 1e-5 * (1 + abs(constant))), like=v)[1]
            solution = (v[size].sum(), (v if beyond is None else beyond)[columns_of[tape.input]])
    if math.isinf(best) and not reached:
        return math.inf, None  # no perturbation within the bounds changes the decision
    lower = min(best, radius) * (1 - 10 * _TOLERANCE)
    if solution is None:
        return lower, None
    return lower, torch.as_tensor(solution[1] - x).reshape(problem.x[0].shape)


def _distance(
    program: Program, at: np.ndarray, x: np.ndarray, norm: str, radius: float
) -> tuple[np.ndarray, np.ndarray]:
    """Variables whose sum is ‖x' − x‖, and the cost vector."""
    size = program.variables(
        np.zeros(1 if norm == "inf" else len(at)), np.full(1 if norm == "inf" else len(at), radius)
    )
    for i, column in enumerate(at):
        own = size[0] if norm == "inf" else size[i]
        program.row([column, own], [1.0, -1.0], -math.inf, x[i])
        program.row([column, own], [1.0, 1.0], x[i], math.inf)
    cost = np.zeros(len(program.lowest))
    cost[size] = 1.0
    if norm == "1":
        program.row(size, np.ones(len(size)), 0.0, radius)
    return size, cost


def _add_units(
    program: Program, tape: OperatorTape, step: TapeStep, relaxed: Relaxation, columns_of: dict[Node, np.ndarray]
) -> np.ndarray:
    """Variables of the results of an activation, with the constraints that make them so.

    g(p) = g(k) + s₀ (p − k) + Σ (sᵢ − sᵢ₋₁) relu(p − kᵢ) with the kinks kᵢ, k the first of them, and the slopes sᵢ around them.
    """
    assert step.activation is not None
    assert step.activation.kinks is not None
    low, high = (bound[0].flatten() for bound in relaxed.read[step.node])
    kinks = sorted(step.activation.kinks(*step.node.args[1:]))
    g = relaxed.function(step)
    ends = torch.tensor([kinks[0] - 1, *kinks, kinks[-1] + 1], dtype=torch.float64)
    values = g(ends).tolist()
    slopes = [(values[i + 1] - values[i]) / float(ends[i + 1] - ends[i]) for i in range(len(ends) - 1)]
    results = program.variables(np.full(len(low), -np.inf), np.full(len(low), np.inf))
    shape = tape.shapes[step.inputs[0]][1:]
    for bound in torch.arange(len(low)).split(tape.rows):
        units = torch.nn.functional.one_hot(bound, len(low)).double().reshape(len(bound), *shape).to(tape.device)
        sources, constants = tape.affine_rows(step.inputs[0], units)
        columns = np.concatenate([columns_of[node] for node in sources])
        entries = torch.cat([value.flatten(1) for value in sources.values()], 1).cpu().numpy()
        for k, unit in enumerate(bound.tolist()):
            affine = (columns, entries[k], float(constants[k]))
            terms = [
                (_add_relu(program, affine, kink, float(low[unit]), float(high[unit])), slopes[i + 1] - slopes[i])
                for i, kink in enumerate(kinks)
            ]
            # result − s₀ p − Σ … = g(k₀) − s₀ k₀
            program.row(
                np.concatenate([[results[unit]], columns, [node for node, _ in terms]]),
                np.concatenate([[1.0], -slopes[0] * entries[k], [-change for _, change in terms]]),
                *[values[1] - slopes[0] * (kinks[0] - float(constants[k]))] * 2,
            )
    return results


def _add_relu(
    program: Program, affine: tuple[np.ndarray, np.ndarray, float], kink: float, low: float, high: float
) -> int:
    """The variable t = max(p − kink, 0), where p is an affine function with values between `low` and `high`."""
    columns, entries, constant = affine
    low, high, offset = low - kink, high - kink, constant - kink
    t = int(program.variables([max(low, 0.0)], [max(high, 0.0)])[0])
    if high <= 0:
        return t
    extended, minus = np.append(columns, t), np.append(-entries, 1.0)
    if low >= 0:
        program.row(extended, minus, offset, offset)
        return t
    on = int(program.variables([0.0], [1.0], binary=True)[0])
    program.row(extended, minus, offset, math.inf)
    program.row(np.append(extended, on), np.append(minus, -low), -math.inf, offset - low)
    program.row([t, on], [1.0, -high], -math.inf, 0.0)
    return t


def _targets(
    tape: OperatorTape, problem: MarginProblem, columns_of: dict[Node, np.ndarray], count: int
) -> list[tuple[np.ndarray, float]]:
    """For each other class (a, b) with lead = a · v + b, which must not be positive."""
    decision, shape = problem.decision, tape.shapes[tape.output][1:]
    label = int(decision.labels[0])
    if decision.classes == 1:
        sign = 1.0 if label == 1 else -1.0
        coefficients, shift = torch.full((1, *shape), sign, dtype=torch.float64), [-sign * decision.threshold]
    else:
        eye = torch.eye(decision.classes, dtype=torch.float64)
        coefficients = torch.stack([eye[label] - eye[j] for j in range(decision.classes) if j != label])
        shift = [0.0] * len(coefficients)
    rows: list[tuple[np.ndarray, float]] = []
    for chunk in coefficients.to(tape.device).split(tape.rows):
        sources, constants = tape.affine_rows(tape.output, chunk)
        for k in range(len(chunk)):
            row = np.zeros(count)
            for node, value in sources.items():
                np.add.at(row, columns_of[node], value[k].flatten().cpu().numpy())
            rows.append((row, float(constants[k]) + shift[len(rows)]))
    return rows
