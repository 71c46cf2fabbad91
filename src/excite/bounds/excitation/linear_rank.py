"""Rank one in deep linear networks x ↦ W_L ⋯ W_1 x with one output: Theorems 4 and 5 of Persistency of excitation.

Both hold in the limit only. What holds on the way, and gives the theorems in the limit, is a bound on the second singular
value of every layer. Matrices are numpy arrays or tensors W_k (n_k, n_{k−1}), first layer first, n_L = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from excite._core.checks import as_scalar, check_number, is_number
from excite.bounds.bound import Assumption, Bound
from excite.bounds.excitation.hard_margin import SEPARABLE, Array, array, separation, signed
from excite.errors import InputError

PAPER = "Persistency of excitation"
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of outputs z (N,) and labels y in {0, 1}, summed: Σ log(1 + exp(−s z)) with s = 2y − 1."""
    return torch.nn.functional.softplus(-(2 * y - 1) * z).sum()


def decay_rank(
    weights: Sequence[Any],
    decay: float | Sequence[float],
    x: Any,
    y: Any,
    loss: Loss = cross_entropy,
    *,
    tolerance: float = 1e-3,
) -> Bound:
    """Rank one under weight decay: σ₂(W_k) ≤ ‖G_k‖₂ / 2μ_k for every layer of a deep linear network (Theorem 4).

    At a stationary point of Σ d(W_L ⋯ W_1 x, y) + Σ μ_k ‖W_k‖²_F every layer has rank at most one. The gradient is
    G_k = (a matrix of rank one) + 2 μ_k W_k, which gives the bound at any weights; the value is the largest over layers.

    Args:
        weights: Matrices W_k (n_k, n_{k−1}), first layer first; the last has one row.
        decay: μ_k > 0, one number or one per layer. If the loss is a sum, μ is half of what PyTorch calls weight decay.
        x: Points (N, n).
        y: Targets (N,).
        loss: ``loss(z, y)`` sums d over outputs z (N,); cross-entropy by default.
        tolerance: Singular values above it, relative to the largest of all layers (or to 1 if that is smaller), count for
            ``terms["rank"]``; also the largest value at which the weights count as stationary.

    Returns:
        An upper bound on the second singular value of every layer.

    Raises:
        InputError: If matrices do not follow each other, or points, targets and decays do not fit them.

    Example:
        >>> import numpy as np
        >>> from excite.bounds import decay_rank
        >>> weights = [np.array([[1.0, 0.0], [0.0, 0.1]]), np.array([[1.0, 0.0]])]
        >>> bound = decay_rank(weights, 0.1, [[1.0, 0.0], [-1.0, 0.0]], [1, 0])
        >>> bound.holds, bool(bound.terms["second"][0] <= bound.terms["value by layer"][0])  # not stationary
        (False, True)
    """
    matrices, points = _chain(weights, x)
    targets = array("labels", y, 1, 2).reshape(-1)
    if len(targets) != len(points):
        raise InputError(f"expected a label for each of {len(points)} points; got {len(targets)}")
    mu = _decays(decay, len(matrices))
    checks = [
        Assumption("the output is scalar", len(matrices[-1]) == 1, f"{len(matrices[-1])} outputs"),
        Assumption("every layer decays", bool((mu > 0).all()), f"smallest μ = {mu.min():.3g}"),
    ]
    spectra = [np.asarray(np.linalg.svd(m, compute_uv=False), dtype=np.float64) for m in matrices]
    terms: dict[str, Any] = _spectral_terms(matrices, spectra, tolerance)
    name, quantity = f"Theorem 4, {PAPER}", "second singular value of every layer"
    if any(c.held is False for c in checks):
        return Bound(name, quantity, None, "upper", terms, tuple(checks))
    gradients = _gradients(matrices, mu, points, targets, loss)
    by_layer = np.array([np.linalg.norm(g, 2) for g in gradients]) / (2 * mu)
    largest = max(1.0, max(float(s[0]) for s in spectra))
    value = float(by_layer.max())
    terms |= {"value by layer": by_layer, "gradient norm": float(np.sqrt(sum((g**2).sum() for g in gradients)))}
    detail = f"‖G‖/2μ = {value:.2e}, at most {tolerance:g} × {largest:.3g}"
    checks.append(Assumption("the weights are stationary", value <= tolerance * largest, detail))
    return Bound(name, quantity, value, "upper", terms, tuple(checks))


def cross_entropy_rank(
    weights: Sequence[Any], x: Any, y: Any, initial: Sequence[Any] | None = None, *, tolerance: float = 0.1
) -> Bound:
    """Rank one after training with cross-entropy: a bound on σ₂/σ₁ of every layer of a deep linear network (Theorem 5).

    σ₂(W_k)² ≤ Σ_{j ≥ k} λ_max(W_j W_j' − W_{j+1}' W_{j+1})₊ at any weights, since W_L is one row. Gradient flow keeps these
    differences as they were at the start while ‖W_k‖ → ∞, which is why layers become one direction; the paper's proof takes
    the limit of ratios of derivatives for that of ratios.

    Args:
        weights: Matrices W_k (n_k, n_{k−1}), first layer first; the last has one row.
        x: Points (N, n), separable by a hyperplane through the origin.
        y: Labels (N,) in {0, 1}.
        initial: Matrices that training started from. With them ``terms["promised"]`` is the value from their differences and
            ``terms["drift"]`` what training changed these by.
        tolerance: Singular values above it, relative to the layer's largest, count for ``terms["rank"]``.

    Returns:
        An upper bound on σ₂/σ₁ of every layer.

    Raises:
        InputError: If matrices do not follow each other, or points and labels do not fit them.

    Example:
        >>> import numpy as np
        >>> from excite.bounds import cross_entropy_rank
        >>> weights = [np.array([[9.0, 0.0], [0.0, 0.1]]), np.array([[9.0, 0.0]])]
        >>> bound = cross_entropy_rank(weights, [[1.0, 0.0], [-1.0, 0.0]], [1, 0])
        >>> bound.holds, bound.terms["rank"]
        (True, [1, 1])
    """
    matrices, points = _chain(weights, x)
    points, s = signed(points, y)
    t = separation(points, s, bias=False)
    separated = "a hyperplane through the origin separates the classes"
    checks = [
        Assumption("the output is scalar", len(matrices[-1]) == 1, f"{len(matrices[-1])} outputs"),
        Assumption(separated, t > SEPARABLE, f"largest relative gap {t:.2e}"),
    ]
    spectra = [np.asarray(np.linalg.svd(m, compute_uv=False), dtype=np.float64) for m in matrices]
    terms: dict[str, Any] = _spectral_terms(matrices, spectra, tolerance, each=True)
    name, quantity = f"Theorem 5, {PAPER}", "second over first singular value of every layer"
    if any(c.held is False for c in checks):
        return Bound(name, quantity, None, "upper", terms, tuple(checks))
    smallest = (np.linalg.multi_dot([points, *[m.T for m in matrices]])[:, 0] * s).min()
    detail = f"smallest output {smallest:.3g}"
    checks.append(Assumption("all points are classified correctly", bool(smallest > 0), detail))
    first = np.array([float(v[0]) for v in spectra])
    differences = _differences(matrices)
    value = _from_differences(differences, first)
    terms |= {"value by layer": value, "conserved": [np.linalg.norm(d, 2) for d in differences]}
    if initial is not None:
        before, _ = _chain(initial, points)
        if [m.shape for m in before] != [m.shape for m in matrices]:
            raise InputError("initial: expected matrices of the same shapes as the weights")
        terms |= _promised(differences, _differences(before), first)
    ratio = float(value.max())
    detail = f"σ₂/σ₁ at most {ratio:.2e}"
    checks.append(Assumption("the weights have grown in one direction", ratio <= tolerance, detail))
    return Bound(name, quantity, ratio, "upper", terms, tuple(checks))


def _promised(differences: list[Array], initial: list[Array], first: Array) -> dict[str, float]:
    """The bound from the differences at the start, and what training changed them by."""
    drifts = [float(np.linalg.norm(a - b, 2)) for a, b in zip(differences, initial)]
    return {
        "promised": float(_from_differences(initial, first).max()),
        "promised, with drift": float(_from_differences(initial, first, drifts).max()),
        "drift": max(drifts, default=0.0),
    }


def alignment(weights: Sequence[Any]) -> Array:
    """Alignment |u_k · v_{k+1}| of adjacent layers, with u_k, v_k the first left and right singular vectors of W_k.

    It is one where the first output direction of a layer is the first input direction of the next.

    Args:
        weights: Matrices W_k (n_k, n_{k−1}), first layer first.

    Returns:
        Array (L − 1,) of numbers from 0 to 1.

    Raises:
        InputError: If a weight is no matrix of numbers.

    Example:
        >>> import numpy as np
        >>> from excite.bounds import alignment
        >>> alignment([np.diag([2.0, 1.0]), np.array([[0.0, 3.0]])]).tolist()
        [0.0]
    """
    decompositions = [np.linalg.svd(array("weight", w, 2), full_matrices=False) for w in weights]
    return np.array([abs(float(a[0][:, 0] @ b[2][0])) for a, b in pairwise(decompositions)])


def _decays(decay: float | Sequence[float], layers: int) -> Array:
    single = is_number(as_scalar(decay)) and not isinstance(decay, list | tuple)
    mu = np.full(layers, check_number(decay, "decay")) if single else array("decay", decay, 1)
    if len(mu) != layers:
        raise InputError(f"decay: expected one number, or one for each of {layers} layers; got {len(mu)}")
    return mu


def _spectral_terms(
    matrices: list[Array], spectra: list[Array], tolerance: float, *, each: bool = False
) -> dict[str, Any]:
    """Ranks above a tolerance relative to each layer's largest singular value (`each`) or to that of all layers."""
    tolerance = check_number(tolerance, "tolerance", 0)
    largest = max(1.0, max(float(s[0]) for s in spectra))
    ranks = [int((s > tolerance * (float(s[0]) if each else largest)).sum()) for s in spectra]
    second = [float(s[1]) if len(s) > 1 else 0.0 for s in spectra]
    return {"rank": ranks, "first": [float(s[0]) for s in spectra], "second": second, "alignment": alignment(matrices)}


def _differences(matrices: list[Array]) -> list[Array]:
    """W_k W_k' − W_{k+1}' W_{k+1}: gradient flow conserves them."""
    return [a @ a.T - b.T @ b for a, b in pairwise(matrices)]


def _from_differences(differences: list[Array], first: Array, drifts: Sequence[float] | None = None) -> Array:
    """√(Σ_{j ≥ k} λ_max(D_j)₊) / σ₁(W_k) by layer. λ₂(W_k W_k') ≤ λ₂(W_{k+1}' W_{k+1}) + λ_max(D_k), from the last layer on."""
    drifts = [0.0] * len(differences) if drifts is None else drifts
    excess = [max(0.0, float(np.linalg.eigvalsh(d)[-1]) + drift) for d, drift in zip(differences, drifts)]
    return np.asarray(np.sqrt(np.cumsum([0.0, *reversed(excess)])[::-1]) / np.maximum(first, 1e-300))


def _gradients(matrices: list[Array], mu: Array, points: Array, targets: Array, loss: Loss) -> list[Array]:
    layers = [torch.from_numpy(m).requires_grad_() for m in matrices]
    with torch.enable_grad():
        z = torch.from_numpy(points)
        for layer in layers:
            z = z @ layer.T
        total = loss(z[:, 0], torch.from_numpy(targets))
        total = total + sum(m * (w**2).sum() for m, w in zip(mu.tolist(), layers))
        return [g.numpy() for g in torch.autograd.grad(total, layers)]


def _chain(weights: Sequence[Any], x: Any) -> tuple[list[Array], Array]:
    matrices = [array(f"weight {k + 1}", w, 2) for k, w in enumerate(weights)]
    points = array("points", x, 2)
    sizes = [points.shape[1], *(m.shape[0] for m in matrices)]
    if not matrices or not points.size or any(m.shape[1] != n or not m.size for m, n in zip(matrices, sizes)):
        shapes = ", ".join(str(m.shape) for m in matrices)
        raise InputError(f"expected points (N, n) and matrices that follow each other; got {points.shape} and {shapes}")
    return matrices, points
