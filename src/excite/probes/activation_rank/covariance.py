"""Covariances in float64: sums of outer products in place, and eigenvalues of several, fetched from their device at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg.blas import dsyrk
from torch import Tensor

from excite._core.lanczos import Array
from excite.errors import InputError
from excite.probes.activation_rank.smallest import default_tolerance
from excite.probes.spectrum import Spectrum, spectrum

# Float64 is not everywhere: there sums are made on the CPU.
_WITHOUT_DOUBLE = {"mps"}


def home(device: torch.device) -> torch.device:
    """Where sums over rows on `device` are kept."""
    return torch.device("cpu") if device.type in _WITHOUT_DOUBLE else device


def add_outer(total: Tensor, rows: Tensor) -> None:
    """total += rowsᵀ rows for total (D, D) and rows (R, D), both float64; only the lower triangle of total counts."""
    if total.device.type != "cpu":
        total.addmm_(rows.T, rows)
        return
    # What lies row by row here is column by column to BLAS, so that its upper triangle is our lower one.
    dsyrk(1.0, rows.contiguous().numpy().T, beta=1.0, c=total.numpy().T, overwrite_c=1)


def symmetric(total: Tensor) -> Array:
    """The whole matrix, on the CPU."""
    lower = np.tril(total.cpu().numpy())
    return lower + np.tril(lower, -1).T  # type: ignore[no-any-return]


class Covariances:
    """Covariances of several matrices of rows (N, D), or of stacks (S, N, D) of S such matrices.

    They are formed where the rows are, N × N where that is smaller; `spectra` fetches them and does the rest on the CPU. It waits for
    the device, so it may be called from another thread.
    """

    def __init__(self, several: Sequence[Tensor]):
        devices = {device: home(device) for device in {rows.device for rows in several}}
        stacks = [rows.detach().to(devices[rows.device]) for rows in several]
        formed = [_matrix(rows) for rows in stacks]
        counts = [len(rows) if rows.dim() == 3 else 1 for rows in stacks]
        each = [i for i, count in enumerate(counts) for _ in range(count)]
        self._sizes = [formed[i][0].shape[-1] for i in each]
        self._widths = [stacks[i].shape[-1] for i in each]
        dtypes = [torch.float64 if stacks[i].dtype == torch.float64 else torch.float32 for i in each]
        self._tolerances = [default_tolerance(width, dtype) for width, dtype in zip(self._widths, dtypes)]
        # Of each covariance its entries, then the largest |h|.
        flat_matrices = [torch.cat([matrix.flatten(-2), size[..., None]], -1).reshape(-1) for matrix, size in formed]
        self._flat = torch.cat(flat_matrices) if flat_matrices else torch.zeros(0)

    @property
    def apart(self) -> bool:
        """Whether they are on a device that has to be waited for."""
        return self._flat.device.type != "cpu"

    def spectra(self) -> list[Spectrum]:
        """Returns the spectrum of each covariance; waits for the device."""
        self._flat = self._flat.cpu()
        flat = self._flat.numpy()
        ends = np.cumsum([size * size + 1 for size in self._sizes])
        matrices = [flat[end - size * size - 1 : end - 1].reshape(size, size) for size, end in zip(self._sizes, ends)]
        largest = [float(flat[end - 1]) for end in ends]
        if not np.isfinite(flat).all():
            _refuse(matrices, largest)
        of_size: dict[int, list[int]] = {}
        for i, size in enumerate(self._sizes):
            of_size.setdefault(size, []).append(i)
        eigenvalues: dict[int, Array] = {}
        for numbers in of_size.values():
            stack = np.stack([matrices[i] for i in numbers]) if len(numbers) > 1 else matrices[numbers[0]][None]
            eigenvalues |= dict(zip(numbers, torch.linalg.eigvalsh(torch.from_numpy(stack)).flip(-1).numpy()))
        rows = zip(range(len(matrices)), self._widths, largest, self._tolerances)
        return [spectrum(np.asarray(eigenvalues[i]), width, peak, tolerance) for i, width, peak, tolerance in rows]


def _refuse(matrices: Sequence[Array], largest: Sequence[float]) -> None:
    """Raises the error of the first covariance that is not finite."""
    for matrix, peak in zip(matrices, largest):
        if not math.isfinite(peak):
            raise InputError("expected finite activations; got NaN or infinite ones: clean the data")
        if not np.isfinite(matrix).all():
            raise InputError(
                f"expected activations whose squares are finite; got values up to {peak:.3g}: scale the data"
            )


def _matrix(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(1/N) Σ(h − mean)(h − mean)ᵀ, or the matrix of inner products with the same eigenvalues, and the largest |h|."""
    wide = rows.double()
    count, width = wide.shape[-2:]
    if not count:
        raise InputError("expected at least one point; got none")
    size = wide.abs().amax((-2, -1)) if wide.numel() else wide.new_zeros(wide.shape[:-2])
    if wide.dim() == 2:
        centred = wide - wide.mean(0)
    else:  # a product with 1/N is much faster on a GPU than the mean
        centred = wide - wide.new_full((1, count), 1 / count) @ wide
    return (centred @ centred.mT if count < width else centred.mT @ centred) / count, size
