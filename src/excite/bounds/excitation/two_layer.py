"""Two-layer ReLU networks fitted with squared error: a Lipschitz bound and a margin from the step size alone.

Persistency of excitation, Theorem 1 and Corollary 1. For f(x) = W(Vx + b)_+ (+ c) at a point of parameter space without
kinks, the Hessian H of ½ Σ ‖f(x_i) − y_i‖² has on its diagonal, for each unit k with active points I_k,

    Σ_{I_k} (V_k x_i + b_k)²   and   ‖W_k‖² Σ_{I_k} x_i x_i'.

Both are at most λ_max(H), hence at most q = 2/δ where gradient descent with step δ has settled.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from excite.bounds.bound import Assumption, Bound
from excite.bounds.excitation.active import most_active
from excite.bounds.relu_network import Pairs, ReluNetwork, relu_network
from excite.bounds.squared import FittedNetwork, Loss, UnitMoments, excited, fitted, moments
from excite.bounds.stability import Descent
from excite.errors import InputError, ModelError

Form = Literal["unit", "stated"]


def two_layer_lipschitz(
    model: nn.Module | Pairs,
    x: Tensor,
    y: Tensor,
    descent: float | Descent,
    *,
    form: Form = "unit",
    loss: Loss = "half-sum",
    tolerance: float = 1e-4,
    seconds: float = 10.0,
) -> Bound:
    """Lipschitz constant (2-norms) of a two-layer ReLU network, bounded by its step size (Theorem 1).

    Units with W_k = 0 or V_k = 0 do nothing and are left out. With q = 2/δ, S_k = Σ_{I_k} x x' over the points I_k that
    activate unit k, and μ_k = ‖Σ_{I_k} x‖:

    - form "unit": max over x of Σ_{active k} w_k v_k with w_k = √(q / λ_max(S_k)) and v_k the larger root of
      λ_min(S_k) v² − 2 |b_k| μ_k v + |I_k| b_k² − q;
    - form "stated": n √(q/λ) (2 μ B/λ + √(|q − B²|/λ)) with n the largest number of active units, λ = min λ_min(S_k),
      μ = max μ_k, B = max |b_k|. The step of its proof to all units at once needs μ² ≥ λ; otherwise q stands for |q − B²|.

    Args:
        model: A fully connected ReLU network as a module, or its layers as [(V, b or None), (W, c or None)].
        x: All training points (N, ...).
        y: Their targets (N, m).
        descent: Step size δ of gradient descent, or a `Descent` with momentum.
        form: "unit" (sharper) or "stated" (as printed in the paper).
        loss: The loss that steps were taken on: "half-sum" ½ Σ ‖f − y‖², "sum", "half-mean" (over points) or "mean"
            (over points and outputs, as ``F.mse_loss``).
        tolerance: Largest relative gradient at which training counts as converged.
        seconds: Time limit for the maximum over x. ``terms["exact"]`` says whether it is exact or itself an upper bound.

    Returns:
        An upper bound on the Lipschitz constant.

    Raises:
        InputError: If ``form`` or ``loss`` is unknown, or the shapes of points and targets do not fit.
        ModelError: If the model is not a fully connected ReLU network with two linear layers.

    Example:
        >>> import torch
        >>> from excite.bounds import two_layer_lipschitz
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> layers = [(torch.tensor([[1.0], [-1.0]]), None), (torch.tensor([[1.0, 1.0]]), None)]  # f(x) = |x|
        >>> bound = two_layer_lipschitz(layers, x, x.abs(), 0.1)
        >>> bound.holds, round(bound.value, 6)
        (True, 4.0)
    """
    if form not in ("unit", "stated"):
        raise InputError(f"expected form 'unit' or 'stated'; got {form!r}")
    return _theorem_1(fitted(_two(model, x), x, y, descent, loss, tolerance), form, seconds)


def _theorem_1(fitted_network: FittedNetwork, form: Form, seconds: float) -> Bound:
    V, W = fitted_network.network.weights
    bias = fitted_network.network.biases[0]
    b = V.new_zeros(len(V)) if bias is None else bias
    per_unit = moments(fitted_network.x, fitted_network.signals[1] > 0)
    inactive = (V.norm(dim=1) == 0) | (W.norm(dim=0) == 0)
    assumptions = (*fitted_network.assumptions, excited(per_unit, inactive, "the hidden layer"))
    terms: dict[str, object] = {
        "limit": fitted_network.limit,
        "sharpness": fitted_network.sharpness.value,
        "active points": tuple(int(n) for n in per_unit.count),
        "smallest eigenvalues": tuple(per_unit.smallest.tolist()),
        "deficient": per_unit.deficient,
    }
    value = None
    if assumptions[-1].held:
        active = torch.nonzero(~inactive).flatten()
        value, more = (_unit if form == "unit" else _stated)(fitted_network, per_unit, b, active, seconds)
        terms |= more
    name = f"Persistency of excitation, Theorem 1 ({'per unit' if form == 'unit' else 'as stated'})"
    return Bound(name, "Lipschitz constant of the network", value, terms=terms, assumptions=assumptions)


def _two(model: nn.Module | Pairs, x: Tensor) -> ReluNetwork:
    network = relu_network(model, x)
    if len(network.weights) != 2:
        raise ModelError(f"expected a network with two linear layers; got {len(network.weights)}: use deep_lipschitz")
    return network


def _unit(
    fitted_network: FittedNetwork, m: UnitMoments, b: Tensor, active: Tensor, seconds: float
) -> tuple[float, dict[str, object]]:
    q, low, bias, mu = fitted_network.limit, m.smallest[active], b[active].abs(), m.mean[active]
    # Where H is within its limit the quadratic has real roots, because ‖V_k‖ lies between them.
    root = ((bias * mu).square() + low * (q - m.count[active] * bias.square())).clamp(min=0).sqrt()
    rows = (bias * mu + root) / low
    columns = (q / m.largest[active]).sqrt()
    max_active = most_active(
        fitted_network.network.weights[0][active].numpy(), b[active].numpy(), (rows * columns).numpy(), seconds=seconds
    )
    return max_active.value, {
        "rows": tuple(rows.tolist()),  # bounds on ‖V_k‖
        "columns": tuple(columns.tolist()),  # bounds on ‖W_k‖
        "units": tuple(active[list(max_active.units)].tolist()),
        "exact": max_active.exact,
    }


def _stated(
    fitted_network: FittedNetwork, m: UnitMoments, b: Tensor, active: Tensor, seconds: float
) -> tuple[float, dict[str, object]]:
    q = fitted_network.limit
    if not len(active):
        return 0.0, {"n_active": 0, "exact": True}
    low, mu, B = float(m.smallest[active].min()), float(m.mean[active].max()), float(b[active].abs().max())
    max_active = most_active(fitted_network.network.weights[0][active].numpy(), b[active].numpy(), seconds=seconds)
    # (|b|μ + √(b²μ² + λ(q − b²)))/λ grows with |b| only if μ² ≥ λ: without that, B says nothing about smaller biases.
    monotone = mu * mu >= low
    row = 2 * mu * B / low + math.sqrt((abs(q - B * B) if monotone else q) / low)
    return max_active.value * math.sqrt(q / low) * row, {
        "n_active": int(max_active.value),
        "exact": max_active.exact,
        "λ": low,
        "μ": mu,
        "B": B,
        "monotone": monotone,
    }


def two_layer_margin(
    model: nn.Module | Pairs,
    x: Tensor,
    y: Tensor,
    descent: float | Descent,
    *,
    form: Form = "unit",
    loss: Loss = "half-sum",
    tolerance: float = 1e-4,
    seconds: float = 10.0,
) -> Bound:
    """Margin of a two-layer classifier, bounded from below by its step size: margin ≥ Δ / (2 𝓛) (Corollary 1).

    Δ = min f over the class with the larger target − max f over the other, which must be positive; the classifier decides at
    the middle, ``terms["threshold"]``; its margin is the smallest distance (2-norm) of a training point to the other side. 𝓛
    is the bound of `two_layer_lipschitz`.

    Args:
        model: A fully connected ReLU network as a module, or its layers as [(V, b or None), (W, c or None)].
        x: All training points (N, ...).
        y: Their targets (N,): one number per class.
        descent: Step size δ of gradient descent, or a `Descent` with momentum.
        form: "unit" (sharper) or "stated" (as printed in the paper).
        loss: The loss that steps were taken on: "half-sum" ½ Σ ‖f − y‖², "sum", "half-mean" (over points) or "mean"
            (over points and outputs, as ``F.mse_loss``).
        tolerance: Largest relative gradient at which training counts as converged.
        seconds: Time limit for the maximum over x in 𝓛.

    Returns:
        A lower bound on the margin of the training points.

    Raises:
        InputError: If there are not two different targets, or ``form`` or ``loss`` is unknown.
        ModelError: If the model is not a fully connected ReLU network with two linear layers.

    Example:
        >>> import torch
        >>> from excite.bounds import two_layer_margin
        >>> x, y = torch.tensor([[-2.0], [-1.0], [3.0], [4.0]]), torch.tensor([0.0, 0.0, 1.0, 1.0])
        >>> layers = [(torch.tensor([[1.0], [1.0]]), torch.tensor([-1.5, -2.5])), (torch.tensor([[1.0, -1.0]]), None)]
        >>> bound = two_layer_margin(layers, x, y, 0.01)
        >>> bound.holds, bound.terms["Δ"], bound.terms["threshold"]
        (True, 1.0, 0.5)
    """
    network = _two(model, x)
    outputs = len(network.weights[-1])
    name, quantity = "Persistency of excitation, Corollary 1", "margin of the training points"
    if outputs != 1:
        failed = Assumption("the network has one output", False, f"{outputs} outputs")
        return Bound(name, quantity, None, "lower", assumptions=(failed,))
    lipschitz = two_layer_lipschitz(model, x, y, descent, form=form, loss=loss, tolerance=tolerance, seconds=seconds)
    targets = y.detach().double().cpu().reshape(-1)
    if len(values := targets.unique()) != 2:
        raise InputError(f"expected two targets, one per class; got {len(values)} different ones")
    output = network.signals(x.detach().double().cpu().flatten(1))[-1].flatten()
    low, high = float(output[targets == values[0]].max()), float(output[targets == values[1]].min())
    gap = high - low
    apart = Assumption("the outputs of the two classes do not overlap", gap > 0, f"Δ = {gap:.6g}")
    value = gap / (2 * lipschitz.value) if lipschitz.value else (None if lipschitz.value is None else math.inf)
    terms = {**lipschitz.terms, "Δ": gap, "threshold": low + gap / 2, "lipschitz": lipschitz.value}
    return Bound(name, quantity, value, "lower", terms, (*lipschitz.assumptions, apart))
