"""The smallest eigenvalue of a second-moment matrix, its rank, and whether it counts as positive definite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import lapack
from scipy.linalg.blas import dsymv, dtrsv
from torch import Tensor

from excite._core.checks import check_number, check_tensor
from excite._core.lanczos import Array, largest
from excite.errors import InputError

_SMALL = 64  # up to this width all eigenvalues are as quick
_GUESS = 0.8
_MAX_ERROR = 0.1  # error of a smallest eigenvalue over itself
_EPS = float(np.finfo(np.float64).eps)


def default_tolerance(width: int, dtype: torch.dtype = torch.float64) -> float:
    """How small an eigenvalue may be, over the largest one, before it counts as zero.

    (width · eps)² with eps of the type that the activations were computed in: what rounding the activations alone can
    put into a direction that has none (the usual rule for ranks, σ ≤ width · eps · σ_max, squared). At least
    64 · width · eps of float64, because the products are summed in float64.
    """
    return max((width * torch.finfo(dtype).eps) ** 2, 64 * width * _EPS)


def rounding(width: int) -> float:
    """Bound on the rounding error of an eigenvalue by sums and factorizations in float64, relative to the largest one."""
    return 4 * width * _EPS


@dataclass(frozen=True)
class Smallest:
    """Smallest eigenvalue and rank of a positive semidefinite matrix.

    Attributes:
        value: The smallest eigenvalue, up to error · largest.
        error: Error of `value`, over the largest eigenvalue.
        largest: The largest eigenvalue.
        rank: Number of eigenvalues above tolerance · largest.
        width: Size of the matrix.
        sure: False if an eigenvalue is so close to the tolerance that rounding may have decided.

    Example:
        >>> result = excite.probes.smallest_eigenvalue(torch.diag(torch.tensor([2.0, 1.0, 0.0])))
        >>> result.rank, result.width, result.excited
        (2, 3, False)
    """

    value: float
    error: float
    largest: float
    rank: int
    width: int
    sure: bool = True  # no eigenvalue is so close to the tolerance that rounding could have decided

    @property
    def excited(self) -> bool:
        """Whether the matrix has full rank."""
        return self.rank == self.width


def smallest_eigenvalues(
    matrices: Iterable[Tensor],
    tolerance: float | None = None,
    accuracy: float = 1e-4,
    *,
    points: Iterable[int] | None = None,
) -> list[Smallest]:
    """`smallest_eigenvalue` of several similar matrices, such as those of the units of one layer: each speeds up the next.

    Args:
        matrices: The matrices (D, D).
        tolerance: Eigenvalues up to tolerance · largest count as zero.
        accuracy: Accuracy of the results, over the largest eigenvalues.
        points: Number of outer products each matrix is the sum of: with fewer than D, the smallest eigenvalue is exactly zero.

    Returns:
        One `Smallest` per matrix.

    Raises:
        InputError: If a matrix is not square or not finite.

    Example:
        >>> from excite.probes import smallest_eigenvalues
        >>> results = smallest_eigenvalues([torch.eye(2), torch.ones(2, 2)])
        >>> [result.rank for result in results]
        [2, 1]
    """
    result: list[Smallest] = []
    ratio, excited = 0.0, True  # the smallest ratio of eigenvalues so far; how the last one turned out
    for matrix, count in zip(matrices, repeat(None) if points is None else points):
        few = count is not None and count < len(matrix)
        guess = None if few or not excited else _GUESS * ratio
        eigenvalue = smallest_eigenvalue(matrix, tolerance, accuracy, guess=guess)
        if few:
            eigenvalue = replace(eigenvalue, value=0.0, error=0.0, rank=min(eigenvalue.rank, count or 0))
        else:
            excited = eigenvalue.excited
            if excited:
                ratio = min(ratio or 1.0, eigenvalue.value / eigenvalue.largest)
        result.append(eigenvalue)
    return result


def smallest_eigenvalue(
    matrix: Tensor, tolerance: float | None = None, accuracy: float = 1e-4, *, guess: float | None = 0.0
) -> Smallest:
    """Smallest eigenvalue of a positive semidefinite matrix, and whether it is zero.

    Positive definite with certainty: the Cholesky factorization of matrix − tolerance · largest · 1 exists. Its factor then serves
    Lanczos on the inverse, which stops once the smallest eigenvalue is known to within accuracy · largest and a tenth of itself
    (with the probability 1 − 1e-9 of `lanczos.largest`). Otherwise the signs in an LDLᵀ factorization count the eigenvalues on each
    side of tolerance · largest (Sylvester), and the smallest is between 0 and that.

    Args:
        matrix: The matrix (D, D); only its lower triangle is read. Computed in float64.
        tolerance: Eigenvalues up to tolerance · largest count as zero.
        accuracy: Accuracy of the result, over the largest eigenvalue.
        guess: Lower estimate of smallest / largest, which makes Lanczos faster; None expects a deficient matrix. It does not
            change the verdict.

    Returns:
        A `Smallest`: the value, its error, the rank and the largest eigenvalue.

    Raises:
        InputError: If the matrix is not square or not finite.

    Example:
        >>> from excite.probes import smallest_eigenvalue
        >>> round(smallest_eigenvalue(torch.diag(torch.tensor([4.0, 1.0]))).value, 3)
        1.0
    """
    if check_tensor(matrix, "a square matrix", 2).shape[0] != matrix.shape[1] or not matrix.numel():
        raise InputError(f"smallest_eigenvalue: expected a square matrix; got shape {tuple(matrix.shape)}")
    tolerance = None if tolerance is None else check_number(tolerance, "tolerance", 0)
    accuracy = check_number(accuracy, "accuracy", 0)
    width = matrix.shape[0]
    tolerance = default_tolerance(width) if tolerance is None else tolerance
    # Row by row in memory, seen as columns: the lower triangle is LAPACK's upper one.
    a = matrix.detach().to("cpu", torch.float64).contiguous().numpy().T
    if not np.isfinite(np.tril(a.T)).all():
        raise InputError("smallest_eigenvalue: expected finite values")
    if np.trace(a) <= 0:  # positive semidefinite: all zero
        return Smallest(0.0, 0.0, 0.0, 0, width)
    if width <= _SMALL:
        return from_eigenvalues(np.linalg.eigvalsh(a, UPLO="U"), tolerance)
    if guess is None and (result := _deficient(a, tolerance)) is not None:
        return result
    low, high = _largest(a, max_products=6)  # the trace is enough from above
    threshold = (tolerance + rounding(width)) * high
    for shift in sorted({threshold, max(threshold, (guess or 0.0) * low)}, reverse=True):
        factor, failed = lapack.dpotrf(_shifted(a, shift), lower=0, clean=0, overwrite_a=1)
        if not failed:
            break
    else:
        return _deficient(a, tolerance) or from_eigenvalues(np.linalg.eigvalsh(a, UPLO="U"), tolerance)
    # Eigenvalues of the inverse: its largest is 1 / (smallest − shift).
    inverse = largest(
        lambda v: dtrsv(factor, dtrsv(factor, v, trans=1), overwrite_x=1),
        width,
        lambda less, more: 1 / less - 1 / more <= min(accuracy * low, _MAX_ERROR * (shift + 1 / less)),
    )
    above, below = (shift + 1 / x for x in inverse)
    return Smallest(above, (above - below) / low + rounding(width), low, width, width)


def from_eigenvalues(values: Array, tolerance: float) -> Smallest:
    """The same from all eigenvalues, in rising order."""
    width, top = len(values), float(values[-1])
    rank = int((values > tolerance * top).sum())
    sure = not bool((abs(values / top - tolerance) <= rounding(width)).any())
    return Smallest(max(0.0, float(values[0])), rounding(width), top, rank, width, sure)


def _deficient(a: Array, tolerance: float) -> Smallest | None:
    """By inertia: LDLᵀ of a − tolerance · largest · 1. None if it is not deficient, or too close to say."""
    width = len(a)
    low, high = _largest(a, within=1.001)
    shift = tolerance * high
    workspace = int(lapack.dsytrf_lwork(width, lower=0)[0])
    factor, pivots, failed = lapack.dsytrf(_shifted(a, shift), lower=0, lwork=workspace, overwrite_a=1)
    rank = width - _negative(factor, pivots)
    if failed or rank == width:  # failed: an eigenvalue is the shift itself
        return None
    # The eigenvalue nearest to the shift, by the largest eigenvalue of the inverse squared.
    doubt = rounding(width) * high + tolerance * (high - low)

    def twice(v: Array) -> Array:
        solved, _ = lapack.dsytrs(factor, pivots, v, lower=0)
        again, _ = lapack.dsytrs(factor, pivots, solved, lower=0)
        return again  # type: ignore[no-any-return]

    near = largest(twice, width, lambda less, more: more <= doubt**-2 or less >= doubt**-2, max_products=32)[1] ** -0.5
    return Smallest(0.0, shift / low, low, rank, width) if near > doubt else None


def _largest(a: Array, within: float = 1.0, max_products: int = 96) -> tuple[float, float]:
    """(low, high) around the largest eigenvalue, with high ≤ within · low if `max_products` products are enough for that."""
    low, high = largest(
        lambda v: dsymv(1.0, a, v), len(a), lambda low, high: high <= within * low, max_products=max_products
    )
    return low, min(high, float(np.trace(a)))


def _shifted(a: Array, shift: float) -> Array:
    a = a.copy(order="F")
    np.fill_diagonal(a, a.diagonal() - shift)
    return a


def _negative(factor: Array, pivots: npt.NDArray[np.int32]) -> int:
    """Number of negative eigenvalues of D in a = U D Uᵀ.

    LAPACK marks blocks of two by negative pivots, in pairs; such a block always has one eigenvalue of each sign.
    """
    single = pivots > 0
    return int((factor.diagonal()[single] < 0).sum() + (~single).sum() // 2)
