"""Deep ReLU networks fitted with squared error: bounds on every weight matrix from the step size and the activations.

Richness of hidden activations, Theorem 1 with the row bounds of its appendix A. Where gradient descent with step δ has
settled, the block of layer j + 1 of the Hessian gives for every point i, with A_i the derivative of the output with
respect to the input of that layer's ReLU and q = 2/δ,

    ‖A_i‖² ‖h_j(x_i)‖² ≤ q,   and A_i h_{j+1}(x_i) = h_L(x_i) gives   ‖h_j(x_i)‖² ≤ q ‖h_{j+1}(x_i)‖² / ‖h_L(x_i)‖².

The paper has no biases. With them the same holds if h_j gets a last entry 1 wherever a bias reads it, and h_L(x_i) is
replaced by what h_{j+1} alone contributes to it, A_i h_{j+1}(x_i).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from excite.bounds.bound import Assumption, Bound
from excite.bounds.excitation.two_layer import Form
from excite.bounds.relu_network import Pairs, relu_network
from excite.bounds.squared import FittedNetwork, Loss, excited, fitted, moments
from excite.bounds.stability import Descent
from excite.errors import InputError

_NAME = "Richness of hidden activations, Theorem 1"


def deep_norms(
    model: nn.Module | Pairs,
    x: Tensor,
    y: Tensor,
    descent: float | Descent,
    *,
    form: Form = "unit",
    loss: Loss = "half-sum",
    tolerance: float = 1e-4,
) -> tuple[Bound, ...]:
    """Spectral norm of every layer of a deep ReLU network, bounded by its step size and activations (Theorem 1, richness paper).

    Form "stated", with q = 2/δ and I_k the points that activate unit k of layer j and have an output other than zero:

    - layers j < L: ‖W_j‖² ≤ Σ_k row_k², row_k² = Σ_{I_k} c_i / λ_min(Σ_{I_k} h_{j−1} h_{j−1}'), c_i = q ‖h_{j+1}‖² / ‖h_L‖² (the
      paper prints h_j, its proof gives h_{j+1});
    - the last: ‖W_L‖² ≤ Σ_k column_k², column_k² = q / max_{I_k} ‖h_{L−2}‖².

    Form "unit" takes for row_k² the smallest of that, |I_k| / λ_min(Σ_{I_k} h_{j−1} h_{j−1}' / c_i) and, below the last
    layer, q / λ_min(Σ_{I_k} h_{L−2} h_{L−2}'); and column_k² = q / λ_max(Σ_{I_k} h_{L−2} h_{L−2}'). With biases rows include them.

    Args:
        model: A fully connected ReLU network as a module, or its layers as [(weight, bias or None), ...].
        x: All training points (N, ...).
        y: Their targets (N, m).
        descent: Step size δ of gradient descent, or a `Descent` with momentum.
        form: "unit" (sharper) or "stated" (as printed in the paper).
        loss: The loss that steps were taken on: "half-sum" ½ Σ ‖f − y‖², "sum", "half-mean" (over points) or "mean"
            (over points and outputs, as ``F.mse_loss``).
        tolerance: Largest relative gradient at which training counts as converged.

    Returns:
        One upper bound on ‖W_j‖₂ per layer, in order. ``terms`` has "rows" or "columns", and "norm", the measured ‖W_j‖₂.

    Raises:
        InputError: If ``form`` or ``loss`` is unknown, or the shapes of points and targets do not fit.
        ModelError: If the model is not a fully connected ReLU network.

    Example:
        >>> import torch
        >>> from excite.bounds import deep_norms
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> layers = [(torch.tensor([[1.0], [-1.0]]), None), (torch.tensor([[1.0, 1.0]]), None)]  # f(x) = |x|
        >>> bounds = deep_norms(layers, x, x.abs(), 0.1)
        >>> all(bound.terms["norm"] <= bound.value for bound in bounds)
        True
    """
    if form not in ("unit", "stated"):
        raise InputError(f"expected form 'unit' or 'stated'; got {form!r}")
    network = fitted(relu_network(model, x), x, y, descent, loss, tolerance)
    layers = len(network.network.weights)
    return (*(_hidden(network, j, form) for j in range(1, layers)), _last(network, form))


def deep_lipschitz(
    model: nn.Module | Pairs,
    x: Tensor,
    y: Tensor,
    descent: float | Descent,
    *,
    form: Form = "unit",
    loss: Loss = "half-sum",
    tolerance: float = 1e-4,
) -> Bound:
    """Lipschitz constant (2-norms) of a deep ReLU network, bounded by its step size and activations: Π of `deep_norms`.

    Args:
        model: A fully connected ReLU network as a module, or its layers as [(weight, bias or None), ...].
        x: All training points (N, ...).
        y: Their targets (N, m).
        descent: Step size δ of gradient descent, or a `Descent` with momentum.
        form: "unit" (sharper) or "stated" (as printed in the paper).
        loss: The loss that steps were taken on: "half-sum" ½ Σ ‖f − y‖², "sum", "half-mean" (over points) or "mean"
            (over points and outputs, as ``F.mse_loss``).
        tolerance: Largest relative gradient at which training counts as converged.

    Returns:
        An upper bound on the Lipschitz constant; ``terms["norms"]`` are the bounds of the layers.

    Raises:
        InputError: If ``form`` or ``loss`` is unknown, or the shapes of points and targets do not fit.
        ModelError: If the model is not a fully connected ReLU network.

    Example:
        >>> import torch
        >>> from excite.bounds import deep_lipschitz
        >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> layers = [(torch.tensor([[1.0], [-1.0]]), None), (torch.tensor([[1.0, 1.0]]), None)]  # f(x) = |x|
        >>> round(deep_lipschitz(layers, x, x.abs(), 0.1).value, 6)
        8.0
    """
    layers = deep_norms(model, x, y, descent, form=form, loss=loss, tolerance=tolerance)
    values = [math.inf if layer.value is None else layer.value for layer in layers]
    return Bound(
        f"{_NAME} ({'per unit' if form == 'unit' else 'as stated'})",
        "Lipschitz constant of the network",
        math.prod(values),
        terms={"limit": layers[0].terms["limit"], "sharpness": layers[0].terms["sharpness"], "norms": tuple(values)},
        assumptions=(*layers[0].assumptions[:-1], *(layer.assumptions[-1] for layer in layers)),
    )


def _augmented(h: Tensor, bias: Tensor | None) -> Tensor:
    """h (N, d) as the layer with this bias sees it: with a last entry 1 if it has one."""
    return h if bias is None else torch.cat([h, h.new_ones(len(h), 1)], 1)


def _reaching(fitted_network: FittedNetwork, j: int) -> Tensor:
    """Contribution of h_j alone to the output, W_L G_{L−1} … W_{j+1} h_j: (N, m).

    Without biases above, or for j = L, the output itself.
    """
    network, signals = fitted_network.network, fitted_network.signals
    flowing = signals[j]
    for layer in range(j, len(network.weights)):
        flowing = flowing @ network.weights[layer].T
        if layer + 1 < len(network.weights):
            flowing = flowing * (signals[layer + 1] > 0)
    return flowing


def _hidden(fitted_network: FittedNetwork, j: int, form: Form) -> Bound:
    """The bound on W_j for j = 1, …, L − 1; `weights[j − 1]` in the list."""
    network, signals, q = fitted_network.network, fitted_network.signals, fitted_network.limit
    h = _augmented(signals[j - 1], network.biases[j - 1])
    quiet = network.weights[j - 1].norm(dim=1) == 0
    entry = 0.0 if network.biases[j] is None else 1.0  # of the next layer's input, for its bias
    output = _reaching(fitted_network, j + 1)
    size = output.square().sum(1)
    excess = q * signals[j + 1].square().sum(1) / size - entry  # c_i: at least ‖h_j‖²
    active = (signals[j] > 0) & (size > 0)[:, None]
    excess = torch.where(size > 0, excess, 0.0)
    plain = moments(h, active)
    excitation = excited(plain, quiet, f"layer {j}")
    rows = (active.to(h.dtype) * excess[:, None]).sum(0) / plain.smallest
    if form == "unit" and bool((excess[size > 0] > 0).all()):
        scaled = moments(h, active, torch.where(size > 0, 1 / excess, 0.0))
        rows = torch.minimum(rows, torch.where(scaled.smallest > 0, scaled.count / scaled.smallest, math.inf))
        if j + 1 == len(network.weights):
            rows = torch.minimum(rows, q / plain.smallest)
    rows = torch.where(quiet, 0.0, rows)
    return _bound(fitted_network, j, "rows", rows, excitation, form)


def _last(fitted_network: FittedNetwork, form: Form) -> Bound:
    network, signals, q = fitted_network.network, fitted_network.signals, fitted_network.limit
    layers = len(network.weights)
    h = _augmented(signals[layers - 2], network.biases[layers - 2])
    quiet = network.weights[-1].norm(dim=0) == 0
    active = (signals[-2] > 0) & (signals[-1].square().sum(1) > 0)[:, None]
    if form == "unit":
        sizes = moments(h, active).largest
    else:
        sizes = torch.where(active, h.square().sum(1)[:, None], 0.0).amax(0)
    bad = torch.nonzero((sizes <= 0) & ~quiet).flatten().tolist()
    reached = Assumption(
        f"every unit of layer {layers - 1} is activated by some point",
        not bad,
        f"{len(bad)} of {len(quiet)} units never active" + (f": {', '.join(map(str, bad[:8]))}" if bad else ""),
    )
    columns = torch.where(quiet, 0.0, q / sizes)
    return _bound(fitted_network, layers, "columns", columns, reached, form)


def _bound(
    fitted_network: FittedNetwork, j: int, description: str, squares: Tensor, last: Assumption, form: Form
) -> Bound:
    return Bound(
        f"{_NAME} ({'per unit' if form == 'unit' else 'as stated'})",
        f"spectral norm of the weight of layer {j}",
        float(squares.clamp(min=0).sum().sqrt()),
        terms={
            description: tuple(squares.clamp(min=0).sqrt().tolist()),
            "norm": float(torch.linalg.matrix_norm(fitted_network.network.weights[j - 1], 2)),
            "limit": fitted_network.limit,
            "sharpness": fitted_network.sharpness.value,
        },
        assumptions=(*fitted_network.assumptions, last),
    )
