"""Applies the theorems of `excite.bounds` to a model; for those that do not apply, says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from excite import bounds
from excite._core.calls import pick_output
from excite._core.preserve import eval_mode
from excite.bounds import Bound
from excite.errors import ExciteError, ModelError
from excite.lipschitz import local
from excite.margin import SearchOptions, margins
from excite.report.audit.chains import Pairs, linear_chain
from excite.report.audit.target import (
    AuditTarget,
    NotApplicable,
    TheoremResult,
    as_linear,
    as_relu,
    known_descent,
    need_two_classes,
)
from excite.report.audit.training_setup import mean_loss, targets


def apply_theorems(target: AuditTarget) -> tuple[tuple[TheoremResult, ...], tuple[NotApplicable, ...]]:
    """Results of all theorems about trained networks that apply to this one, and those that do not apply."""
    results: list[TheoremResult] = []
    not_applicable: list[NotApplicable] = []
    for theorem, find in THEOREMS.items():
        try:
            results += find(target)
        except ExciteError as error:
            not_applicable.append(NotApplicable(theorem, re.sub("^expected ", "it requires ", str(error))))
    return tuple(results), tuple(not_applicable)


def stability(target: AuditTarget) -> list[TheoremResult]:
    """Sharpness of the loss against the limit that the step size sets."""
    descent = known_descent(target)
    if target.setup.loss is None:
        raise ModelError(target.setup.why)

    def loss(model: nn.Module) -> Tensor:
        return mean_loss(model, target.x, target.y, target.classes, target.setup)

    with eval_mode(target.model):
        result = bounds.descent_stability(target.model, loss, descent)
    scope = "" if target.complete else f", of the loss on {len(target.x)} of {target.total} training points"
    return [TheoremResult(result, result.terms["sharpness"], f"by Lanczos{scope}")]


def squared_two_layers(target: AuditTarget) -> list[TheoremResult]:
    """Lipschitz constant and margin of a two-layer ReLU network trained with squared error."""
    network = as_relu(target)
    if len(network.weights) != 2:
        raise ModelError(f"it requires two layers; the network has {len(network.weights)}")
    arguments = _squared_arguments(target)
    result = [_lipschitz(target, bounds.two_layer_lipschitz(**arguments))]
    if target.classes == 2 and len(network.weights[-1]) == 1:
        margin = bounds.two_layer_margin(**arguments)
        result.append(TheoremResult(margin, *_smallest_margin(target, margin)))
    return result


def squared_deep(target: AuditTarget) -> list[TheoremResult]:
    """Lipschitz constant of a deep ReLU network trained with squared error."""
    network = as_relu(target)
    result = _lipschitz(target, bounds.deep_lipschitz(**_squared_arguments(target)))
    norms = [float(torch.linalg.matrix_norm(weight, 2)) for weight in network.weights]
    return [replace(result, layers=tuple(zip(result.bound.terms["norms"], norms)))]


def cross_entropy_linear(target: AuditTarget) -> list[TheoremResult]:
    """Margin of a linear classifier."""
    w, b = _hyperplane(as_linear(target, 1), target)
    x, y = target.x.flatten(1), target.y
    result = [bounds.linear_margin_any_time(x, y, w, b, *_initial_hyperplane(target))]
    if target.setup.loss == "cross-entropy":
        result += [bounds.linear_margin(x, y, w, b), bounds.relaxed_linear_margin(x, y)]
    how = "distance of the nearest training point to the hyperplane"
    limit = "the same, of the limit of gradient descent, from the data alone"
    return [
        TheoremResult(bound, bound.terms.get("margin"), how)
        if "limit" not in bound.quantity
        else TheoremResult(bound, bound.terms.get("limit margin"), limit)
        for bound in result
    ]


def cross_entropy_two_layers(target: AuditTarget) -> list[TheoremResult]:
    """Lipschitz constant of a two-layer ReLU network trained with cross-entropy."""
    network = as_relu(target, "cross-entropy")
    if len(network.weights) != 2:
        raise ModelError(f"it requires two layers; the network has {len(network.weights)}")
    need_two_classes(target)
    (V, W), (b, c) = network.weights, network.biases
    if c is not None:
        raise ModelError("the theorem has no bias in the output layer; the network has one")
    # Two logits are a scalar f = (w₁ − w₀)·h; over √2, so that |w_k| = ‖(V_k, b_k)‖ is what gradient flow balances.
    w = W[0] if len(W) == 1 else (W[1] - W[0]) / 2**0.5
    result = bounds.directional_lipschitz(V, V.new_zeros(len(V)) if b is None else b, w, target.x.flatten(1), target.y)
    h = network.signals(target.x.double().flatten(1))[1]
    smallest = float(((2 * target.y.double() - 1) * (h @ w)).min())
    max_gradient = float((((h > 0) * w) @ V).norm(dim=1).max())
    return [TheoremResult(result, max_gradient / smallest if smallest > 0 else None, "the steepest training point")]


def linear_rank(target: AuditTarget) -> list[TheoremResult]:
    """Rank of the layers of a deep linear network."""
    pairs = as_linear(target, 2)
    if any(bias is not None for _, bias in pairs):
        raise ModelError("the theorems have no biases; the network has some")
    need_two_classes(target)
    weights, x, y = [weight for weight, _ in pairs], target.x.flatten(1), target.y
    setup, how = target.setup, "largest over layers, from their singular values"
    result = []
    if setup.loss == "cross-entropy":
        bound = bounds.cross_entropy_rank(weights, x, y)
        ratios = [s / f for s, f in zip(bound.terms["second"], bound.terms["first"])]
        result.append(TheoremResult(bound, max(ratios), how))
    if setup.decay > 0:

        def total(z: Tensor, labels: Tensor) -> Tensor:
            return (z - labels).square().sum()

        # A mean over N points with decay/2 ‖θ‖² is 1/N of the sum with N decay/2 ‖θ‖².
        extra: dict[str, Any] = {} if setup.loss == "cross-entropy" else {"loss": total}
        bound = bounds.decay_rank(weights, len(x) * setup.decay / 2, x, y, **extra)
        result.append(TheoremResult(bound, max(bound.terms["second"]), how))
    if not result:
        raise ModelError("they require cross-entropy or weight decay; the network was trained without")
    return result


THEOREMS: dict[str, Callable[[AuditTarget], list[TheoremResult]]] = {
    "Stability of gradient descent": stability,
    "Persistency of excitation, Theorem 1 and Corollary 1: two-layer ReLU networks, squared error": squared_two_layers,
    "Richness of hidden activations, Theorem 1: deep ReLU networks, squared error": squared_deep,
    "Persistency of excitation, Theorem 2 and Corollary 2: linear classifiers": cross_entropy_linear,
    "Persistency of excitation, Theorem 3: two-layer ReLU networks, cross-entropy": cross_entropy_two_layers,
    "Persistency of excitation, Theorems 4 and 5: deep linear networks": linear_rank,
}


def _squared_arguments(target: AuditTarget) -> dict[str, Any]:
    """Arguments of the theorems on squared error.

    The training loss is a mean over points of ‖f − target‖²: m times `F.mse_loss`, which is the theorems' "mean"; if
    `averaged`, it is `F.mse_loss` itself.
    """
    with eval_mode(target.model), torch.no_grad():
        output = pick_output(target.model(target.x))
    y = targets(output, target.y, target.classes)
    descent = known_descent(target)
    if not target.setup.averaged:
        descent = replace(descent, step=descent.step * (y.shape[1] if y.dim() == 2 else 1))
    return {"model": target.model, "x": target.x, "y": y.double(), "descent": descent, "loss": "mean"}


def _lipschitz(target: AuditTarget, bound: Bound) -> TheoremResult:
    return TheoremResult(bound, float(local(target.model, target.x).max()), "the steepest training point")


def _smallest_margin(target: AuditTarget, bound: Bound) -> tuple[float | None, str]:
    """The smallest 2-norm margin, found by search, of the classifier that decides where the theorem does."""
    if bound.value is None:
        return None, "not measured without a bound"
    result = margins(
        target.model,
        target.x,
        target.y,
        norm="2",
        threshold=bound.terms["threshold"],
        options=SearchOptions(evidence=False, certify=False),
    )
    return float(result.values.min()), f"smallest found by search, deciding at {bound.terms['threshold']:.3g}"


def _hyperplane(pairs: Pairs, target: AuditTarget) -> tuple[Tensor, Tensor]:
    """w and b of the classifier w·x + b > 0; of two outputs their difference."""
    need_two_classes(target)
    (weight, bias), outputs = pairs[0], len(pairs[0][0])
    bias = weight.new_zeros(outputs) if bias is None else bias
    if outputs == 2:
        return weight[1] - weight[0], bias[1:] - bias[:1]
    return weight[0], bias[:1] - target.threshold


def _initial_hyperplane(target: AuditTarget) -> tuple[Tensor, Tensor] | tuple[()]:
    """The hyperplane at initialization; empty if it is unknown: the theorem then starts at zero."""
    if target.setup.start is None:
        return ()
    return _hyperplane(linear_chain(target.setup.start(), target.x[:50]), target)
