"""Which theorems speak about a model, what they promise, and what is measured of it; for the others, why not."""

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
from excite.margin import margins
from excite.report.audit.chains import Pairs, linear_chain
from excite.report.audit.target import Promise, Silent, Subject, as_linear, as_relu, known_descent, need_two_classes
from excite.report.audit.training_setup import mean_loss, targets


def promises(subject: Subject) -> tuple[tuple[Promise, ...], tuple[Silent, ...]]:
    """Every theorem of `excite.bounds` about trained networks, on this one."""
    spoken: list[Promise] = []
    silent: list[Silent] = []
    for theorem, find in THEOREMS.items():
        try:
            spoken += find(subject)
        except ExciteError as error:
            silent.append(Silent(theorem, re.sub("^expected ", "it is about ", str(error))))
    return tuple(spoken), tuple(silent)


def stability(subject: Subject) -> list[Promise]:
    descent = known_descent(subject)
    if subject.setting.loss is None:
        raise ModelError(subject.setting.why)

    def loss(model: nn.Module) -> Tensor:
        return mean_loss(model, subject.x, subject.y, subject.classes, subject.setting)

    with eval_mode(subject.model):
        found = bounds.descent_stability(subject.model, loss, descent)
    part = "" if subject.complete else f", of the loss on {len(subject.x)} of {subject.of} training points"
    return [Promise(found, found.terms["sharpness"], f"by Lanczos{part}")]


def squared_two_layers(subject: Subject) -> list[Promise]:
    network = as_relu(subject)
    if len(network.weights) != 2:
        raise ModelError(f"it is about two layers; the network has {len(network.weights)}")
    given = _squared_arguments(subject)
    found = [_lipschitz(subject, bounds.two_layer_lipschitz(**given))]
    if subject.classes == 2 and len(network.weights[-1]) == 1:
        margin = bounds.two_layer_margin(**given)
        found.append(Promise(margin, *_smallest_margin(subject, margin)))
    return found


def squared_deep(subject: Subject) -> list[Promise]:
    network = as_relu(subject)
    found = _lipschitz(subject, bounds.deep_lipschitz(**_squared_arguments(subject)))
    norms = [float(torch.linalg.matrix_norm(weight, 2)) for weight in network.weights]
    return [replace(found, layers=tuple(zip(found.bound.terms["norms"], norms)))]


def cross_entropy_linear(subject: Subject) -> list[Promise]:
    w, b = _hyperplane(as_linear(subject, 1), subject)
    x, y = subject.x.flatten(1), subject.y
    found = [bounds.linear_margin_any_time(x, y, w, b, *_begun(subject))]
    if subject.setting.loss == "cross-entropy":
        found += [bounds.linear_margin(x, y, w, b), bounds.relaxed_linear_margin(x, y)]
    how = "distance of the nearest training point to the hyperplane"
    limit = "the same, of the limit of gradient descent, from the data alone"
    return [
        Promise(one, one.terms.get("margin"), how)
        if "limit" not in one.quantity
        else Promise(one, one.terms.get("limit margin"), limit)
        for one in found
    ]


def cross_entropy_two_layers(subject: Subject) -> list[Promise]:
    network = as_relu(subject, "cross-entropy")
    if len(network.weights) != 2:
        raise ModelError(f"it is about two layers; the network has {len(network.weights)}")
    need_two_classes(subject)
    (V, W), (b, c) = network.weights, network.biases
    if c is not None:
        raise ModelError("the theorem has no bias in the output layer; the network has one")
    # Two logits are a scalar f = (w₁ − w₀)·h; over √2, so that |w_k| = ‖(V_k, b_k)‖ is what gradient flow balances.
    w = W[0] if len(W) == 1 else (W[1] - W[0]) / 2**0.5
    found = bounds.directional_lipschitz(V, V.new_zeros(len(V)) if b is None else b, w, subject.x.flatten(1), subject.y)
    h = network.signals(subject.x.double().flatten(1))[1]
    smallest = float(((2 * subject.y.double() - 1) * (h @ w)).min())
    steepest = float((((h > 0) * w) @ V).norm(dim=1).max())
    return [Promise(found, steepest / smallest if smallest > 0 else None, "the steepest training point")]


def linear_rank(subject: Subject) -> list[Promise]:
    pairs = as_linear(subject, 2)
    if any(bias is not None for _, bias in pairs):
        raise ModelError("the theorems have no biases; the network has some")
    need_two_classes(subject)
    weights, x, y = [weight for weight, _ in pairs], subject.x.flatten(1), subject.y
    setting, how = subject.setting, "largest over layers, from their singular values"
    found = []
    if setting.loss == "cross-entropy":
        one = bounds.cross_entropy_rank(weights, x, y)
        shares = [s / f for s, f in zip(one.terms["second"], one.terms["first"])]
        found.append(Promise(one, max(shares), how))
    if setting.decay > 0:

        def total(z: Tensor, labels: Tensor) -> Tensor:
            return (z - labels).square().sum()

        # A mean over N points with decay/2 ‖θ‖² is 1/N of the sum with N decay/2 ‖θ‖².
        extra: dict[str, Any] = {} if setting.loss == "cross-entropy" else {"loss": total}
        one = bounds.decay_rank(weights, len(x) * setting.decay / 2, x, y, **extra)
        found.append(Promise(one, max(one.terms["second"]), how))
    if not found:
        raise ModelError("they are about cross-entropy or weight decay; the network was trained without")
    return found


THEOREMS: dict[str, Callable[[Subject], list[Promise]]] = {
    "Stability of gradient descent": stability,
    "Persistency of excitation, Theorem 1 and Corollary 1: two-layer ReLU networks, squared error": squared_two_layers,
    "Richness of hidden activations, Theorem 1: deep ReLU networks, squared error": squared_deep,
    "Persistency of excitation, Theorem 2 and Corollary 2: linear classifiers": cross_entropy_linear,
    "Persistency of excitation, Theorem 3: two-layer ReLU networks, cross-entropy": cross_entropy_two_layers,
    "Persistency of excitation, Theorems 4 and 5: deep linear networks": linear_rank,
}


def _squared_arguments(subject: Subject) -> dict[str, Any]:
    """Our loss is a mean over points of ‖f − target‖²: m times `F.mse_loss`, which is the theorems' "mean"; if `averaged`, it
    is that one."""
    with eval_mode(subject.model), torch.no_grad():
        output = pick_output(subject.model(subject.x))
    y = targets(output, subject.y, subject.classes)
    descent = known_descent(subject)
    if not subject.setting.averaged:
        descent = replace(descent, step=descent.step * (y.shape[1] if y.dim() == 2 else 1))
    return {"model": subject.model, "x": subject.x, "y": y.double(), "descent": descent, "loss": "mean"}


def _lipschitz(subject: Subject, bound: Bound) -> Promise:
    return Promise(bound, float(local(subject.model, subject.x).max()), "the steepest training point")


def _smallest_margin(subject: Subject, bound: Bound) -> tuple[float | None, str]:
    """The smallest 2-norm margin, found by search, of the classifier that decides where the theorem does."""
    if bound.value is None:
        return None, "not measured without a bound"
    found = margins(
        subject.model, subject.x, subject.y, norm="2", threshold=bound.terms["threshold"], evidence=False, certify=False
    )
    return float(found.values.min()), f"smallest found by search, deciding at {bound.terms['threshold']:.3g}"


def _hyperplane(pairs: Pairs, subject: Subject) -> tuple[Tensor, Tensor]:
    """w and b of the classifier w·x + b > 0; of two outputs their difference."""
    need_two_classes(subject)
    (weight, bias), outputs = pairs[0], len(pairs[0][0])
    bias = weight.new_zeros(outputs) if bias is None else bias
    if outputs == 2:
        return weight[1] - weight[0], bias[1:] - bias[:1]
    return weight[0], bias[:1] - subject.threshold


def _begun(subject: Subject) -> tuple[Tensor, Tensor] | tuple[()]:
    """The hyperplane at the start, where it is known; without it the theorem's own start is taken, zero."""
    if subject.setting.start is None:
        return ()
    return _hyperplane(linear_chain(subject.setting.start(), subject.x[:50]), subject)
