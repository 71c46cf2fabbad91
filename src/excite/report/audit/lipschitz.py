"""Lipschitz constants of a model: local ones at the points, and an upper bound for all inputs."""

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
class LipschitzConstants:
    """Lipschitz constants in one norm.

    Attributes:
        norm: "2" or "inf".
        local: Local constants at the points of each part; empty where inputs have no derivative, such as token ids.
        guaranteed: Upper bound for all inputs, or None.
        why: How the upper bound was obtained, or why there is none.
    """

    norm: str
    local: Mapping[str, npt.NDArray[np.float64]]
    guaranteed: float | None
    why: str

    def median(self, split: str) -> float:
        """Median local constant of a part."""
        return float(np.median(self.local[split]))

    @property
    def largest(self) -> float:
        """Largest local constant over all points: a lower bound on the global one."""
        return float(max(values.max() for values in self.local.values()))


def lipschitz_constants(model: nn.Module, points: Mapping[str, Tensor], norm: str) -> LipschitzConstants:
    """Measures local constants at the points of each part and bounds the global one."""
    first = next(iter(points.values()))
    if not first.is_floating_point():
        return LipschitzConstants(norm, {}, None, f"the inputs are {first.dtype}, which have no derivative")
    try:
        local_constants = {split: _local(model, x, norm) for split, x in points.items()}
    except ExciteError as error:
        return LipschitzConstants(norm, {}, None, str(error))
    try:
        all_inputs = bound(model, first[:2], norm)
    except ExciteError as error:
        return LipschitzConstants(norm, local_constants, None, str(error))
    return LipschitzConstants(norm, local_constants, all_inputs.value, all_inputs.why)


def _local(model: nn.Module, x: Tensor, norm: str) -> npt.NDArray[np.float64]:
    return np.concatenate([local(model, batch, norm).double().cpu().numpy() for batch in x.split(_BATCH)])
