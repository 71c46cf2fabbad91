"""Mean, covariance and second moments of a stream of vectors, without keeping the vectors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from excite._core.checks import check_count, check_tensor
from excite.errors import InputError
from excite.probes.activation_rank.covariance import add_outer, home, symmetric
from excite.probes.activation_rank.sketch import FrequentDirections
from excite.probes.activation_rank.smallest import default_tolerance
from excite.probes.spectrum import Spectrum, spectrum

EXACT = 1024  # widest vectors whose matrix is kept
SKETCH = 256  # rows of the sketch beyond


class Moments:
    """Mean, covariance and second moments of a stream of rows (R, D), in float64 and without storing the rows.

    Up to the width `exact` the scatter matrix S = Σ(h − mean)(h − mean)ᵀ is stored, (D, D); beyond it, a sketch. Rows are
    collected in blocks, and a block's scatter around its own mean is merged by
        S ← S_a + S_b + n_a n_b / (n_a + n_b) · (mean_b − mean_a)(mean_b − mean_a)ᵀ
    (Chan, Golub and LeVeque), so that nothing cancels where the mean is large. The result does not depend on how the rows are
    split over calls of `add`.

    Args:
        width: Length D of a row.
        exact: Largest width for which the matrix is stored.
        sketch: Rows of the sketch beyond that width.
        device: Device of the sums. Default: the CPU.
        block: Rows per block. Default: 512, or the rows of the sketch.

    Raises:
        InputError: If an argument is not a positive whole number.

    Example:
        >>> from excite.probes import Moments
        >>> moments = Moments(3)
        >>> moments.add(torch.eye(3))  # three points in a plane
        >>> moments.covariance().rank.low
        2.0
    """

    def __init__(
        self,
        width: int,
        exact: int = EXACT,
        sketch: int = SKETCH,
        device: torch.device | None = None,
        block: int | None = None,
    ):
        width, exact, sketch = check_count(width, "width"), check_count(exact, "exact"), check_count(sketch, "sketch")
        block = None if block is None else check_count(block, "block")
        self.device = device = home(device or torch.device("cpu"))
        self.width, self.count = width, 0
        self.exact = width <= exact
        zeros = {"dtype": torch.float64, "device": device}
        self._block = torch.empty(block or (512 if self.exact else sketch), width, **zeros)  # type: ignore[call-overload]
        self._waiting = 0
        self._scatter: Tensor | None = None
        self._sketch = None if self.exact else FrequentDirections(width, sketch, device)
        self._mean = torch.zeros(width, **zeros)  # type: ignore[call-overload]
        self._origin: Tensor | None = None
        self._fourth = 0.0  # Σ‖h − origin‖⁴
        self._size = 0.0  # largest absolute value
        self._dtype = torch.float64

    def add(self, rows: Tensor) -> None:
        """Adds rows.

        Args:
            rows: Floating-point tensor (R, width).

        Raises:
            InputError: If the shape is another one.
        """
        if check_tensor(rows, "rows").dim() != 2 or rows.shape[1] != self.width:
            raise InputError(f"expected rows of shape (R, {self.width}); got {tuple(rows.shape)}")
        if rows.dtype in (torch.float32, torch.float16, torch.bfloat16):
            self._dtype = torch.float32
        rows = rows.detach()
        while len(rows):
            chunk = rows[: len(self._block) - self._waiting]
            self._block[self._waiting : self._waiting + len(chunk)] = chunk
            self._waiting += len(chunk)
            rows = rows[len(chunk) :]
            if self._waiting == len(self._block):
                self._merge()

    def _merge(self) -> None:
        n, self._waiting = self._waiting, 0
        if not n:
            return
        block = self._block[:n]
        self._check(block)
        mean = block.mean(0)
        if self._origin is None:
            self._origin = mean.clone()
        block -= mean
        shift = mean - self._origin
        squares = block.square().sum(1) + 2 * block @ shift + shift @ shift
        self._fourth += float(squares.square().sum())
        step = (mean - self._mean) * math.sqrt(self.count * n / (self.count + n))
        self._add(block)
        if self.count:
            self._add(step[None])
        self._mean += (mean - self._mean) * (n / (self.count + n))
        self.count += n

    def _check(self, block: Tensor) -> None:
        size = float(block.abs().amax()) if block.numel() else 0.0
        if not math.isfinite(size):
            raise InputError("expected finite activations; got NaN or infinite ones: clean the data")
        self._size = max(self._size, size)

    def _add(self, rows: Tensor) -> None:
        if self._sketch is not None:
            self._sketch.add(rows)
            return
        if self._scatter is None:
            self._scatter = rows.new_zeros(self.width, self.width)
        add_outer(self._scatter, rows)

    def tolerance(self) -> float:
        """Relative size below which an eigenvalue counts as zero: D eps of the rows' dtype."""
        return default_tolerance(self.width, self._dtype)

    def covariance(self, tolerance: float | None = None) -> Spectrum:
        """Eigenvalues of (1/n) Σ(h − mean)(h − mean)ᵀ."""
        return self._spectrum(tolerance, around_mean=True)

    def second(self, tolerance: float | None = None) -> Spectrum:
        """Eigenvalues of (1/n) Σ h hᵀ."""
        return self._spectrum(tolerance, around_mean=False)

    def _spectrum(self, tolerance: float | None, around_mean: bool) -> Spectrum:
        few = self.count == 0 and 0 < self._waiting < self.width
        if few:  # fewer rows than columns: n × n instead of D × D
            block = self._block[: self._waiting].cpu()
            self._check(block)
            rows = (block - block.mean(0) if around_mean else block).numpy() / math.sqrt(len(block))
        else:
            self._merge()
            if not self.count:
                raise InputError("expected at least one point; got none")
            rows = np.zeros((0, self.width)) if around_mean else self._mean.cpu().numpy()[None]
        slack, total = 0.0, float((rows**2).sum())
        if not few and self._scatter is not None:
            matrix = symmetric(self._scatter) / self.count + rows.T @ rows
            if not np.isfinite(matrix).all():
                raise InputError(
                    f"expected activations whose squares are finite; got values up to {self._size:.3g}: scale the data"
                )
            eigenvalues = np.linalg.eigvalsh(matrix)[::-1]
            total = float(eigenvalues.sum())
        else:
            if not few:
                sketch: FrequentDirections = self._sketch  # type: ignore[assignment]
                rows = np.concatenate([sketch.rows.cpu().numpy() / math.sqrt(self.count), rows])
                slack, total = sketch.slack / self.count, sketch.total / self.count + total
            eigenvalues = np.linalg.eigvalsh(rows @ rows.T)[::-1]
        return spectrum(
            eigenvalues, self.width, self._size, self.tolerance() if tolerance is None else tolerance, total, slack
        )

    def sampling_error(self, of: int) -> float:
        """Relative error of the covariance's eigenvalues if the rows are a random sample of `of` rows.

        The standard error of the covariance C in the Frobenius norm, over √D and over the largest eigenvalue,
        √((E‖h − mean‖⁴ − ‖C‖²_F) / n · (1 − n/of)) / (√D λ_max). By Hoffman and Wielandt the root mean square error of the D eigenvalues
        is no larger than that of C / √D.

        Args:
            of: Number of rows that the sample was drawn from.

        Returns:
            Root mean square error of the eigenvalues, relative to the largest.
        """
        self._merge()
        spectrum = self.covariance()
        if self.count >= of or spectrum.total <= 0:
            return 0.0
        variance = max(0.0, self._fourth / self.count - float((spectrum.values**2).sum()))
        error = math.sqrt(variance / self.count * (1 - self.count / of) / self.width)
        return error / float(spectrum.values[0])
