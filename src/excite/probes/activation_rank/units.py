"""Which units of a layer are excited: the points that activate a unit have full rank in what the layer sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from excite.probes.activation_rank.covariance import add_outer, home
from excite.probes.activation_rank.smallest import Smallest, from_eigenvalues, smallest_eigenvalues
from excite.probes.layer_inputs import LayerInputs

_BLOCK = 2048  # rows collected before they are added up


@dataclass(frozen=True)
class Units:
    """Excitation of each unit k of a layer: the matrix Σ h hᵀ over the rows h that the layer sees and that activate k.

    A row activates a unit where the input of the unit's activation is positive: w·h + b after any normalization or residual
    sum, or w·h + b itself where no activation follows, as in the output layer. The matrix is a sum, neither centred nor
    extended by a constant for the bias, as in Theorem 1 of the paper on richness, which requires it to be positive definite for
    every unit. A unit is `excited` if all eigenvalues are above tolerance · largest.

    Attributes:
        points: (U,), number of rows that activate the unit.
        rank: (U,), number of eigenvalues above tolerance · largest.
        smallest: (U,), smallest eigenvalue.
        error: (U,), error of `smallest`, over `largest`.
        largest: (U,), a close lower bound of the largest eigenvalue.
        width: Size of the matrices.
        tolerance: Eigenvalues up to tolerance · largest count as zero.

    Example:
        >>> units = excite.probes.richness(model, x, units=True)["0"].units
        >>> units.excited.shape, units.width
        ((8,), 4)
    """

    points: npt.NDArray[np.int64]  # (U,) rows that activate the unit
    rank: npt.NDArray[np.int64]  # (U,)
    smallest: npt.NDArray[np.float64]  # (U,) smallest eigenvalue
    error: npt.NDArray[np.float64]  # (U,) of `smallest`, over `largest`
    largest: npt.NDArray[np.float64]  # (U,) a lower bound of the largest eigenvalue, close to it
    width: int
    tolerance: float

    @property
    def excited(self) -> npt.NDArray[np.bool_]:
        """Which units are excited, (units,): those whose inputs have full rank while they are active."""
        return np.asarray(self.rank == self.width)

    @property
    def deficient(self) -> list[int]:
        """Units that are not excited."""
        return [int(k) for k in np.flatnonzero(~self.excited)]

    @property
    def silent(self) -> list[int]:
        """Units that no point activates; deficient, too."""
        return [int(k) for k in np.flatnonzero(self.points == 0)]

    def __len__(self) -> int:
        return len(self.rank)

    def __str__(self) -> str:
        text = f"{int(self.excited.sum())} of {len(self)} units excited"
        if self.deficient:
            listed = ", ".join(map(str, self.deficient[:20])) + (", …" if len(self.deficient) > 20 else "")
            text += f"; deficient: {listed}; never active: {len(self.silent)}"
        return text


class UnitSums:
    """The matrices of units `start` to `stop` of a layer that sees D columns; float64, (D/groups)² numbers per unit."""

    def __init__(self, units: range, of: int, width: int, groups: int = 1, device: torch.device | None = None):
        self.units, self.each, self.width = units, max(1, of // groups), width // groups
        device = home(device or torch.device("cpu"))
        self.sums = torch.zeros(len(units), self.width, self.width, dtype=torch.float64, device=device)
        self.points = np.zeros(len(units), dtype=np.int64)
        self._rows = torch.empty(_BLOCK, width, dtype=torch.float64, device=device)
        self._active = torch.empty(_BLOCK, len(units), dtype=torch.bool, device=device)
        self._waiting = 0

    def add(self, inputs: LayerInputs, live: Tensor | None = None) -> None:
        """Adds the rows of a batch for which each unit is active."""
        rows, active = live_rows(inputs, live)
        active = active[:, self.units.start : self.units.stop]
        while len(rows):
            n = min(len(rows), _BLOCK - self._waiting)
            places = slice(self._waiting, self._waiting + n)
            self._rows[places], self._active[places] = rows[:n], active[:n]
            self._waiting += n
            rows, active = rows[n:], active[n:]
            if self._waiting == _BLOCK:
                self._flush()

    def _flush(self) -> None:
        rows, active, self._waiting = self._rows[: self._waiting], self._active[: self._waiting], 0
        for i, unit in enumerate(self.units):
            own = rows[:, _columns(unit, self.each, self.width)][active[:, i]]
            if len(own):
                add_outer(self.sums[i], own)
        self.points += active.sum(0).cpu().numpy()

    def decide(self, tolerance: float, accuracy: float) -> list[Smallest]:
        """Returns the smallest eigenvalue of every unit."""
        self._flush()
        return smallest_eigenvalues(self.sums, tolerance, accuracy, points=self.points.tolist())


class UnitFactors:
    """For units in doubt: triangular R with RᵀR = Σ h hᵀ, by QR factorizations of the rows themselves.

    Singular values of R are right to eps of the largest; eigenvalues, their squares, even far below eps of the largest.
    """

    def __init__(self, units: Sequence[int], of: int, width: int, groups: int = 1):
        self.units, self.each, self.width = units, max(1, of // groups), width // groups
        self._factors = {unit: torch.zeros(0, self.width, dtype=torch.float64) for unit in units}

    def add(self, inputs: LayerInputs, live: Tensor | None = None) -> None:
        """Adds the rows of a batch for which each unit is active."""
        rows, active = live_rows(inputs, live)
        for unit in self.units:
            own = rows[:, _columns(unit, self.each, self.width)][active[:, unit]].to("cpu", torch.float64)
            if len(own):
                self._factors[unit] = torch.linalg.qr(torch.cat([self._factors[unit], own]), mode="r").R

    def decide(self, unit: int, tolerance: float) -> Smallest:
        """Returns the smallest eigenvalue of one unit."""
        values = np.zeros(self.width)
        result = torch.linalg.svdvals(self._factors[unit]).square().numpy()
        values[: len(result)] = result
        smallest = from_eigenvalues(values[::-1], tolerance)
        return Smallest(smallest.value, smallest.error, smallest.largest, smallest.rank, smallest.width)


def _columns(unit: int, each: int, width: int) -> slice:
    """The inputs of a unit: the columns of its group, which has `each` units and is `width` wide."""
    first = width * (unit // each)
    return slice(first, first + width)


def live_rows(inputs: LayerInputs, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """Without the rows of points at which the network's output is zero, `live` (R,): Theorem 1 leaves them out."""
    active: Tensor = inputs.active  # type: ignore[assignment]
    if live is None:
        return inputs.rows, active
    counted = live.to(active.device)
    return inputs.rows[counted], active[counted]


def collected(smallest_by_block: Sequence[tuple[Smallest, int]], width: int, tolerance: float) -> Units:
    """Collects the results of units in one table."""
    return Units(
        points=np.array([n for _, n in smallest_by_block], dtype=np.int64),
        rank=np.array([smallest.rank for smallest, _ in smallest_by_block], dtype=np.int64),
        smallest=np.array([smallest.value for smallest, _ in smallest_by_block]),
        error=np.array([smallest.error for smallest, _ in smallest_by_block]),
        largest=np.array([smallest.largest for smallest, _ in smallest_by_block]),
        width=width,
        tolerance=tolerance,
    )
