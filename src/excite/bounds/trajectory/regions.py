"""Bounds from training points on the slope of a ReLU network in linear regions without training points.

What training reveals, Theorem 2. Write s(x) for the Kronecker product of the activations of all hidden layers at x. Before
a sigmoid at the end, the gradient of the network is linear in s(x): if s(x) = Σ_k a_k s(x_k) over training points, then
∇f(x) = Σ_k a_k ∇f(x_k), and with ‖∇f(x_k)‖ ≤ (1 + γ) β φ_k

    λ(R_x) ≤ (1 + γ) β ξ min_a Σ_k |a_k| φ_k   over all such a,

φ_k the normalized update of the first bias, β ≥ σ₁(W₁), ξ = 1, or ¼ / (μ(1 − μ)) with outputs in [μ, 1 − μ] through a
sigmoid. The paper takes μ over the steps at which each point was sampled; the proof needs the outputs of the network
that the statement is about at all training points, and that is what is taken here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from excite._core.checks import check_choice, check_count, check_dense, check_number, check_values, shown, to_array
from excite.bounds.bound import Assumption, Statement
from excite.bounds.relu_network import Pairs, ReluNetwork, relu_network
from excite.bounds.trajectory.modular import Kernel, TooLong
from excite.bounds.trajectory.path_kernel import PathKernel
from excite.bounds.trajectory.patterns import Patterns, patterns, slopes, steepest
from excite.bounds.trajectory.pursuit import Pursuit, distinct, pursue
from excite.errors import InputError, ModelError
from excite.wiring.piecewise import piecewise_linear

LIMIT = 1000  # distinct activation patterns of training points that enter the program
MAX_LIMIT = 2**14  # for exact sums modulo a prime
_TOLERANCE = 1e-9  # relative, for rounding
_NAME = "What training reveals, Theorem 2"


@dataclass(frozen=True)
class EmptyRegions(Statement):
    """Upper bounds on the Lipschitz constant in the linear regions of M points, from `empty_region`.

    Args:
        name: Theorem and paper.
        values: The bounds (M,): infinite where the activation of a point is no combination of those of training points, so that
            the theorem says nothing; all NaN if an assumption failed.
        reached: Mask (M,) of the points that the theorem applies to.
        empty: Mask (M,) of the points whose region has no training point.
        terms: The numbers the bounds are made of.
        assumptions: The conditions of the theorem.

    Example:
        >>> layers = [(torch.tensor([[1.0], [-1.0]]), None), (torch.tensor([[1.0, 2.0]]), None)]
        >>> regions = empty_region(layers, torch.tensor([[1.0]]), None, torch.tensor([[3.0], [-3.0]]))
        >>> regions.empty.tolist()
        [False, True]
    """

    name: str
    values: Tensor
    reached: Tensor
    empty: Tensor
    terms: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()

    def __post_init__(self) -> None:
        if self.failed:
            object.__setattr__(self, "values", torch.full_like(self.values, math.nan))

    @property
    def share(self) -> float:
        """Fraction of points that the theorem applies to; NaN without points."""
        return float(self.reached.double().mean())

    @property
    def share_empty(self) -> float:
        """The same among points in empty regions."""
        return float(self.reached[self.empty].double().mean())

    def __str__(self) -> str:
        values = self.values[self.reached & ~self.values.isnan()]
        statement = (
            f"at most {values.median():.6g} (median), {values.max():.6g} (largest)" if len(values) else "no bound"
        )
        return self.describe(
            f"Lipschitz constant in the regions of {self.share:.1%} of {len(self.values)} points: {statement}"
        )


def empty_region(
    model: nn.Module | Pairs,
    x: Tensor,
    phi: Tensor | float | None,
    new: Tensor,
    *,
    beta: float | None = None,
    gamma: float | None = None,
    mu: float | None = None,
    sigmoid: bool | None = None,
    form: Literal["stated", "point"] = "stated",
    limit: int = LIMIT,
) -> EmptyRegions:
    """Lipschitz constant in linear regions without training points: λ ≤ (1 + γ) β ξ min_a Σ_k |a_k| φ_k (Theorem 2).

    The minimum is over all a with s(x) = Σ_k a_k s(x_k), s the Kronecker product of the activations of all hidden layers and
    x_k training points. Whether a point is reached is decided in integers (see `excite.bounds.trajectory.modular`).

    Args:
        model: A ReLU network with one output: the layers [(weight, bias or None), ...] of a fully connected one, or a module, also with
            convolutions, average pooling, normalization in evaluation mode and skips; s is then over paths to the output.
        x: Training points (N, ...).
        phi: φ, the normalized updates of the first bias at these points (N,), one number for all (steadiness), or None for
            their values at the model itself, ‖∂f/∂b₁‖; if it is not fully connected, the slopes ‖∇f‖ with β = 1. With ``beta=1.0``
            any bounds on the local Lipschitz constants at training points may be passed.
        new: Points (M, ...) at which to bound.
        beta: A bound on σ₁(W₁); σ₁ of the model by default. Required with ``phi`` if the model is not fully connected.
        gamma: γ of Assumption 1, by how much constants at training points may exceed φ; by default the smallest that holds here.
        mu: Outputs at training points lie in [μ, 1 − μ]; by default the smallest such value. Used with a sigmoid only.
        sigmoid: Whether a sigmoid follows the last layer; detected for modules, None means no for pairs.
        form: "stated", or "point" with ¼ / (f_k(1 − f_k)) for each training point instead of ξ: never larger.
        limit: Largest number of distinct patterns in the program. Of more, that many are drawn at random: the bounds still hold.

    Returns:
        The bounds. ``terms``: "gamma", "beta", "mu", "xi", "patterns", "rank", "programs", "rounding" (largest increase of a bound
        by rounding exact coefficients), and with a random subset "kept", "left out", "left out reached" (fraction) and "left out
        ratio" (median of the bound over what the point itself would give).

    Raises:
        InputError: If ``form`` is unknown, points do not fit the network, or a number is out of range.
        ModelError: If the model is not affine between ReLUs.

    Example:
        >>> import torch
        >>> from excite.bounds import empty_region
        >>> layers = [(torch.tensor([[1.0], [-1.0]]), None), (torch.tensor([[1.0, 2.0]]), None)]
        >>> found = empty_region(layers, torch.tensor([[1.0]]), None, torch.tensor([[3.0], [-3.0]]))
        >>> found.reached.tolist()  # no training point activates the second unit
        [True, False]
    """
    check_choice(form, "form", ("stated", "point"))
    limit = check_count(limit, "limit", 1, MAX_LIMIT)
    try:
        network = relu_network(model, x, sigmoid=sigmoid)
    except ModelError:
        if not isinstance(model, nn.Module) or sigmoid:
            raise
        return _through_paths(model, x, phi, new, beta, gamma, limit)
    x, new = check_points(network, x, "training points"), check_points(network, new, "new points")
    active = patterns(network, x)
    return _theorem_2(network, active, new, limit, *_scale(network, x, active, phi, beta, gamma, mu, form))


def _through_paths(
    model: nn.Module,
    x: Tensor,
    phi: Tensor | float | None,
    new: Tensor,
    beta: float | None,
    gamma: float | None,
    limit: int,
) -> EmptyRegions:
    """The theorem for convolutions, average pooling and skips: s(x) says for every path whether all of its units are active."""
    net = piecewise_linear(model, x)
    kernel = PathKernel(net)
    active, at_new = ([gate.bool() for gate in net.signals(points)[1][1:-1]] for points in (x, new))
    gradient_norms = torch.linalg.vector_norm(net.gradients(net.signals(x)[1]), dim=1)
    if phi is None:
        phis, beta = gradient_norms, 1.0
    elif beta is None:
        raise InputError(
            "beta: expected a bound on the norm of the first layer, together with phi; or pass neither of them"
        )
    else:
        phis, beta = _phi(phi, len(x)), _number(beta, "beta")
    needed = max(0.0, float(torch.where(gradient_norms > 0, gradient_norms / (beta * phis), 0.0).max()) - 1)
    gamma = needed if gamma is None else _number(gamma, "gamma")
    holds = math.isfinite(gamma) and needed <= gamma + _TOLERANCE * (1 + gamma)
    assumption = Assumption(
        "slopes at all training points are at most (1 + γ) β φ",
        holds,
        f"γ = {gamma:.3g}, β = {beta:.3g}; needed γ = {needed:.3g}",
    )
    scale = torch.nan_to_num((1 + gamma) * beta * phis, nan=0.0, posinf=0.0)
    try:
        solution, num_unresolved = pursue_some(active, scale, at_new, limit, 0.0, kernel)
    except TooLong:
        raise InputError(
            "the coefficients of the combinations have too many digits to be exact: pass fewer training points, or a smaller limit"
        ) from None
    terms = {"gamma": gamma, "beta": beta, "xi": 1.0, "phi": float(phis.max()), "patterns": solution.columns, "rank": solution.rank,
             "programs": solution.programs, "rounding": 0.0, **num_unresolved}  # fmt: skip
    same = among(active, at_new) if num_unresolved else torch.from_numpy(solution.same)
    values = torch.from_numpy(solution.values)
    return EmptyRegions(_NAME, values, torch.from_numpy(solution.reached), ~same, terms, (assumption,))


def _theorem_2(
    network: ReluNetwork,
    at_training: Patterns,
    new: Tensor,
    limit: int,
    scale: Tensor,
    assumptions: tuple[Assumption, ...],
    terms: dict[str, Any],
) -> EmptyRegions:
    """The program at the points `new`, with the cost of every training point in `scale`."""
    at_new = patterns(network, new)
    solution, num_unresolved = pursue_some(
        at_training, scale, at_new, limit, steepest(network) * (0.25 if network.sigmoid else 1.0)
    )
    terms.update({"patterns": solution.columns, "rank": solution.rank, "programs": solution.programs, **num_unresolved})
    terms["rounding"] = solution.rounding
    values = torch.from_numpy(solution.values)
    same = among(at_training, at_new) if num_unresolved else torch.from_numpy(solution.same)
    return EmptyRegions(_NAME, values, torch.from_numpy(solution.reached), ~same, terms, assumptions)


def check_points(network: ReluNetwork, x: Tensor, description: str) -> Tensor:
    """Returns points as (N, n) in float64, or raises an InputError that says what was expected."""
    width = network.weights[0].shape[1]
    if (
        not isinstance(x, Tensor)
        or check_dense(x, description).dim() < 2
        or not len(x)
        or x.flatten(1).shape[1] != width
    ):
        raise InputError(f"expected {description} (N, {width}), at least one; got {shown(x)}")
    if x.is_complex():
        raise InputError(f"expected {description} as real numbers; got {shown(x)}")
    check_values([x], description)
    return x.detach().double().cpu().flatten(1)


def _scale(
    network: ReluNetwork,
    x: Tensor,
    active: Patterns,
    phi: Tensor | float | None,
    beta: float | None,
    gamma: float | None,
    mu: float | None,
    form: str,
) -> tuple[Tensor, tuple[Assumption, ...], dict[str, Any]]:
    """(1 + γ) β ξ φ_k for each training point; what was assumed, and the parts."""
    bias, gradient_norms = slopes(network, active)
    norm = float(torch.linalg.matrix_norm(network.weights[0], 2))
    assumptions, terms = [], {}
    outputs = network.signals(x)[-1][:, 0]
    bend = torch.ones_like(gradient_norms)
    if network.sigmoid:
        f = outputs.sigmoid()
        bend = f * outputs.neg().sigmoid()  # f (1 − f), also where f rounds to 1
        smallest = float(torch.minimum(f, outputs.neg().sigmoid()).min())
        mu = smallest if mu is None else _number(mu, "mu")
        assumptions.append(
            Assumption(
                "outputs at all training points lie in [μ, 1 − μ]",
                0 < mu <= smallest * (1 + _TOLERANCE),
                f"μ = {mu:.3g}",
            )
        )
        terms["mu"] = mu
    beta = norm if beta is None else _number(beta, "beta")
    gradient_norms = gradient_norms * bend
    phis = bias * bend if phi is None else _phi(phi, len(x))
    ratio = torch.where(gradient_norms > 0, gradient_norms / (beta * phis), 0.0)
    needed = max(0.0, float(ratio.max()) - 1)
    exact = max(0.0, needed - _TOLERANCE) if phi is None else needed  # λ ≤ σ₁ φ at the model itself: more is rounding
    gamma = exact if gamma is None else _number(gamma, "gamma")
    holds = math.isfinite(gamma) and needed <= gamma + _TOLERANCE * (1 + gamma)
    detail = f"γ = {gamma:.3g}, β = {beta:.3g}, σ₁(W₁) = {norm:.3g}; needed γ = {exact:.3g}"
    assumptions.append(Assumption("slopes at all training points are at most (1 + γ) β φ", holds, detail))
    xi = 0.25 / (terms["mu"] * (1 - terms["mu"])) if network.sigmoid and terms["mu"] > 0 else 1.0
    each = 0.25 / bend if network.sigmoid and form == "point" else torch.full_like(gradient_norms, xi)
    terms.update({"gamma": gamma, "beta": beta, "xi": xi, "phi": float(phis.max())})
    scale = (1 + gamma) * beta * each * phis
    return torch.nan_to_num(scale, nan=0.0, posinf=0.0) if not holds else scale, tuple(assumptions), terms


def _number(value: object, name: str) -> float:
    return check_number(value, name, 0)


def _phi(phi: Tensor | float, count: int) -> Tensor:
    values = torch.from_numpy(to_array("phi", phi))
    if values.dim() == 0:
        values = values.expand(count)
    if values.shape != (count,):
        raise InputError(f"expected phi as one number, or one for each of {count} points; got {tuple(values.shape)}")
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise InputError("expected phi finite and at least 0: leave out points without a loss gradient")
    return values


def pursue_some(
    active: Patterns, scale: Tensor, new: Patterns, limit: int, max_slope: float, kernel: Kernel | None = None
) -> tuple[Pursuit, dict[str, Any]]:
    """The program, over a subsample of patterns where there are more than `limit`; and what that loses."""
    columns, cost, points = [layer.numpy() for layer in active], scale.numpy(), [layer.numpy() for layer in new]
    first, back = distinct(columns)
    if len(first) <= limit:
        return pursue(columns, cost, points, max_slope, kernel), {}
    chosen = np.random.default_rng(0).permutation(len(first))[:limit]
    selected = np.isin(back, chosen)
    out = np.flatnonzero(~selected)
    together = [np.concatenate([layer, column[out]]) for layer, column in zip(points, columns)]
    solution = pursue([layer[selected] for layer in columns], cost[selected], together, max_slope, kernel)
    count = len(points[0])
    at_new = replace(solution, values=solution.values[:count], same=solution.same[:count])
    reached = solution.reached[count:]
    ratios = solution.values[count:][reached] / np.where(cost[out] > 0, cost[out], np.nan)[reached]
    ratio = float(np.nanmedian(ratios)) if np.isfinite(ratios).any() else math.inf  # no point was reached
    return at_new, {
        "kept": int(selected.sum()),
        "left out": len(out),
        "left out reached": float(reached.mean()),
        "left out ratio": ratio,
    }


def among(columns: Patterns, new: Patterns) -> Tensor:
    """Which new points have the pattern of a training point."""
    count = len(new[0])
    _, back = distinct([torch.cat(pair).numpy() for pair in zip(new, columns)])
    return torch.from_numpy(np.isin(back[:count], back[count:]))
