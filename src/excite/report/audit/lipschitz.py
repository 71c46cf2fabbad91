"""How steep a model is: local Lipschitz constants at the points, and a constant guaranteed for all inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from excite.errors import ExciteError
from excite.lipschitz import bound, local

_BATCH = 250


@dataclass(frozen=True)
class Steepness:
    """In one norm: `local` constants at the points of each part, and a `guaranteed` one or `why` there is none.

    `local` is empty where inputs have no derivative, as token ids; `why` then says so.
    """

    norm: str
    local: Mapping[str, npt.NDArray[np.float64]]
    guaranteed: float | None
    why: str

    def median(self, part: str) -> float:
        return float(np.median(self.local[part]))

    @property
    def largest(self) -> float:
        """Of all points: the true constant is at least this."""
        return float(max(values.max() for values in self.local.values()))


def steepness(model: nn.Module, parts: Mapping[str, Tensor], norm: str) -> Steepness:
    first = next(iter(parts.values()))
    if not first.is_floating_point():
        return Steepness(norm, {}, None, f"the inputs are {first.dtype}, which have no derivative")
    try:
        found = {part: _local(model, x, norm) for part, x in parts.items()}
    except ExciteError as error:
        return Steepness(norm, {}, None, str(error))
    try:
        all_inputs = bound(model, first[:2], norm)
    except ExciteError as error:
        return Steepness(norm, found, None, str(error))
    return Steepness(norm, found, all_inputs.value, all_inputs.why)


def _local(model: nn.Module, x: Tensor, norm: str) -> npt.NDArray[np.float64]:
    return np.concatenate([local(model, part, norm).double().cpu().numpy() for part in x.split(_BATCH)])
