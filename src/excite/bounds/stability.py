"""The stability condition: gradient descent can settle only where the loss is not too sharp for its step.

On a quadratic with curvature λ, gradient descent with step δ multiplies the error by 1 − δλ. It stays bounded only if
λ ≤ 2/δ. At a stationary point of a smooth loss the same holds for the largest eigenvalue of the Hessian (Lyapunov).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from excite._core.checks import (
    check_count,
    check_dense,
    check_flag,
    check_model,
    check_number,
    check_seed,
    check_weights,
    first_line,
    shown,
)
from excite._core.compatibility import renamed_keywords
from excite._core.preserve import preserve_state
from excite._core.wrappers import eagerly, refuse_lazy, unwrap
from excite.bounds.bound import Assumption, Bound
from excite.errors import ExciteError, InputError, ModelError

_TINY = 8  # up to so many parameters the Hessian is written out


@dataclass(frozen=True)
class Descent:
    """Full-batch gradient descent as `torch.optim.SGD` does it: m ← βm + (1 − τ)g, θ ← θ − δm.

    Args:
        step: Step size δ > 0.
        momentum: β, from 0 up to less than 1.
        dampening: τ, from 0 up to less than 1.
        nesterov: Whether the step is θ ← θ − δ(g + βm).

    Raises:
        InputError: If a number is out of range, or Nesterov's momentum comes without momentum or with dampening.

    Example:
        >>> from excite.bounds import Descent
        >>> Descent(0.1).limit, Descent(0.1, momentum=0.5).limit
        (20.0, 30.0)
    """

    step: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", check_number(self.step, "step size", 0, above=True))
        for name in ("momentum", "dampening"):
            object.__setattr__(self, name, check_number(getattr(self, name), name, 0, 1))
            if getattr(self, name) == 1:
                raise InputError(f"{name}: expected a number from 0 up to less than 1; got 1")
        object.__setattr__(self, "nesterov", check_flag(self.nesterov, "nesterov"))
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise InputError("Nesterov's momentum needs momentum > 0 and no dampening, as in torch.optim.SGD")

    @property
    def limit(self) -> float:
        """The largest curvature at which it can settle: 2(1 + β)/((1 − τ)δ), or 2(1 + β)/((1 + 2β)δ) with Nesterov.

        Without momentum the dampening has no effect, as in `torch.optim.SGD`.
        """
        if self.momentum == 0:
            return 2 / self.step
        shrink = 1 + 2 * self.momentum if self.nesterov else 1 - self.dampening
        return 2 * (1 + self.momentum) / (shrink * self.step)


def as_descent(descent: float | Descent) -> Descent:
    """The rule of descent that a step size, or a `Descent`, stands for."""
    if isinstance(descent, Descent):
        return descent
    return Descent(check_number(descent, "step size", 0, above=True))


@dataclass(frozen=True)
class Sharpness:
    """An estimate of the largest eigenvalue of a Hessian, with the norm of the gradient at the same point.

    Args:
        value: v'Hv of the unit vector v found, never more than the largest eigenvalue.
        residual: ‖Hv − value · v‖: an eigenvalue lies within it of ``value``.
        gradient: Norm of the gradient.
        products: Number of Hessian-vector products.
        parameters: Number of parameters.

    Example:
        >>> import torch
        >>> from excite.bounds import sharpness
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> sharpness(model, lambda m: m(x).square().sum() / 2).parameters
        2
    """

    value: float
    residual: float
    gradient: float
    products: int
    parameters: int


@renamed_keywords(most="max_restarts")
def sharpness(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    tolerance: float | None = None,
    max_restarts: int = 1000,
    seed: int = 0,
) -> Sharpness:
    """Largest eigenvalue of the Hessian of a loss in the parameters with requires_grad=True, by Lanczos' method.

    The model runs in the mode it is in and is left as it was.

    Args:
        model: The model.
        loss: Takes the model and returns a scalar, as in ``lambda m: F.mse_loss(m(x), y)``; called once.
        tolerance: Residual, relative to the value, at which to stop; 1e-8 in double precision, 1e-4 otherwise by default.
        max_restarts: Largest number of restarts.
        seed: Of the start vector.

    Returns:
        The estimate with its residual.

    Raises:
        InputError: If the loss is not one finite number with a gradient.
        ModelError: If no parameter has requires_grad=True, or the loss fails or has no second derivative.

    Example:
        >>> import torch
        >>> from excite.bounds import sharpness
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> round(sharpness(model, lambda m: m(x).square().sum() / 2).value, 4)  # the largest eigenvalue of x'x
        9.0
    """
    model = unwrap(check_weights(check_model(model)))
    refuse_lazy(model)
    if not callable(loss):
        raise InputError(f"loss: expected a function of the model; got {shown(loss)}")
    max_restarts, seed = check_count(max_restarts, "max_restarts"), check_seed(seed)
    tolerance = None if tolerance is None else check_number(tolerance, "tolerance", 0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ModelError("no parameter has requires_grad=True: the loss has no Hessian")
    # Fused attention has no second derivative; the plain one has.
    with preserve_state(model), eagerly(model), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        try:
            value = loss(model)
        except ExciteError:
            raise
        except Exception as error:
            raise ModelError(
                f"the loss raised {first_line(error)}: expected a function of the model that returns one number"
            ) from error
        return largest_eigenvalue(value, parameters, tolerance=tolerance, max_restarts=max_restarts, seed=seed)


def largest_eigenvalue(
    loss: Tensor,
    parameters: Sequence[Tensor],
    *,
    tolerance: float | None = None,
    max_restarts: int = 1000,
    seed: int = 0,
) -> Sharpness:
    """`sharpness` for a loss that is computed already.

    Args:
        loss: Scalar tensor that depends on ``parameters``.
        parameters: Tensors with requires_grad=True.
        tolerance: As for `sharpness`.
        max_restarts: As for `sharpness`.
        seed: As for `sharpness`.

    Returns:
        The estimate with its residual.

    Raises:
        InputError: If the loss is not one finite number with a gradient.
        ModelError: If the loss has no second derivative.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
        described = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"expected a loss that is one number with a gradient; got {described}")
    check_dense(loss, "loss")
    first = torch.autograd.grad(loss.reshape(()), parameters, create_graph=True, materialize_grads=True)
    gradient = torch.cat([g.reshape(-1) for g in first])
    size = gradient.numel()
    value, norm = float(loss.detach()), float(gradient.detach().double().norm())
    if not (math.isfinite(value) and math.isfinite(norm)):
        raise InputError(f"expected a finite loss and gradient; got {value} and {norm}")
    if not gradient.requires_grad:  # the loss is linear
        return Sharpness(0.0, 0.0, norm, 0, size)
    count = 0

    def product(vector: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        direction = torch.from_numpy(np.ascontiguousarray(vector).reshape(-1)).to(gradient)
        try:
            second = torch.autograd.grad(gradient @ direction, parameters, retain_graph=True, materialize_grads=True)
        except RuntimeError as error:
            line = str(error).splitlines()[0]
            raise ModelError(f"the loss has no second derivative that autograd can take: {line}") from error
        flat = torch.cat([s.reshape(-1) for s in second]).detach().cpu().double().numpy()
        if not np.isfinite(flat).all():
            raise InputError("the second derivatives of the loss are not finite")
        return flat

    if tolerance is None:
        tolerance = 1e-8 if gradient.dtype == torch.float64 else 1e-4
    value, vector = _top(product, size, tolerance, max_restarts, seed)
    residual = float(np.linalg.norm(product(vector) - value * vector))
    return Sharpness(value, residual, norm, count, size)


def _top(
    product: Callable[[np.ndarray], np.ndarray], size: int, tolerance: float, max_restarts: int, seed: int
) -> tuple[float, np.ndarray]:
    if size <= _TINY:
        matrix = np.stack([product(row) for row in np.eye(size)])
        values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        return float(values[-1]), vectors[:, -1]
    start = np.random.default_rng(seed).standard_normal(size)
    start /= np.linalg.norm(start)
    if not product(start).any():  # a random vector is in the kernel only if everything is
        return 0.0, start
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    try:
        values, vectors = eigsh(operator, k=1, which="LA", v0=start, tol=tolerance, maxiter=max_restarts)
    except ArpackNoConvergence as stopped:
        if not len(stopped.eigenvalues):
            # Nothing converged: the Rayleigh quotient of a power step says little, and its residual says so.
            vector = product(start)
            vector /= np.linalg.norm(vector)
            return float(vector @ product(vector)), vector
        values, vectors = stopped.eigenvalues, stopped.eigenvectors
    return float(values[-1]), vectors[:, -1]


def stable(sharpness: Sharpness, limit: float) -> Assumption:
    """Whether λ_max ≤ limit.

    The estimate never exceeds λ_max, so a failure is certain; it is unknown where the estimate has not converged (residual above a
    hundredth of it) or the limit lies within its residual.
    """
    holds: bool | None = sharpness.value <= limit
    if holds and (sharpness.residual > 0.01 * abs(sharpness.value) or sharpness.value + sharpness.residual > limit):
        holds = None
    detail = f"λ_max = {sharpness.value:.6g}, residual {sharpness.residual:.1e}, limit {limit:.6g}"
    return Assumption("the largest eigenvalue of the Hessian is at most what the step size allows", holds, detail)


@renamed_keywords(most="max_restarts")
def descent_stability(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    descent: float | Descent,
    *,
    tolerance: float | None = None,
    max_restarts: int = 1000,
    seed: int = 0,
) -> Bound:
    """Whether gradient descent can settle at a model: λ_max of the Hessian against `Descent.limit`, 2/δ without momentum.

    Args:
        model: The model.
        loss: The loss that steps were taken on, as a function of the model. Mean or sum as it was: a mean over N points has
            1/N of the curvature of the sum.
        descent: Step size δ, or a `Descent` with momentum.
        tolerance: As for `sharpness`.
        max_restarts: As for `sharpness`.
        seed: As for `sharpness`.

    Returns:
        An upper bound on λ_max, whose assumption says whether it holds here. ``terms``: "sharpness", "residual", "limit",
        "gradient" (its norm), "largest step" (the step at which λ_max is the limit) and "products".

    Raises:
        InputError: If the loss is not one finite number with a gradient, or the step size is not positive.
        ModelError: If no parameter has requires_grad=True, or the loss fails or has no second derivative.

    Example:
        >>> import torch
        >>> from excite.bounds import descent_stability
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> descent_stability(model, lambda m: m(x).square().sum() / 2, 0.1).holds  # 9 is below 2/0.1
        True
        >>> descent_stability(model, lambda m: m(x).square().sum() / 2, 0.5).value is None  # and above 2/0.5
        True
    """
    rule = as_descent(descent)
    result = sharpness(model, loss, tolerance=tolerance, max_restarts=max_restarts, seed=seed)
    ratio = rule.limit / result.value if result.value > 0 else math.inf
    return Bound(
        "Stability of gradient descent",
        "largest eigenvalue of the loss's Hessian",
        rule.limit,
        terms={
            "sharpness": result.value,
            "residual": result.residual,
            "limit": rule.limit,
            "gradient": result.gradient,
            "largest step": rule.step * ratio,
            "products": result.products,
        },
        assumptions=(stable(result, rule.limit),),
    )
