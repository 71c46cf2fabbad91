"""A regression: one real number for each output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.checks import check_dense
from excite._core.preserve import capturing
from excite.errors import InputError, ModelError
from excite.excitation.targets.target import Target


class Values(Target):
    """Real-valued targets y, one for each output: errors ‖f − y‖², the sum over outputs (section 5.2)."""

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the model's outputs as (B,), or (B, k) for several."""
        if returned.shape == (batch, 1):
            return returned.squeeze(1)
        if returned.shape == (batch,) or (returned.dim() == 2 and len(returned) == batch and returned.shape[1]):
            return returned
        raise ModelError(
            f"targets='values' needs outputs ({batch},) or ({batch}, k); the model returned {tuple(returned.shape)}: "
            "flatten them in the model, or pick some with output="
        )

    def labels(self, y: object, batch: int, deferred: DeferredChecks | None = None) -> Tensor:
        """Returns the targets as (B,) or (B, k)."""
        if not isinstance(y, Tensor):
            raise InputError(f"targets: expected a tensor of floating-point numbers; got {type(y).__name__}")
        if not y.is_floating_point():
            raise InputError(
                f"targets: targets='values' expects floating-point numbers; got {y.dtype}: use y.float(), or leave out "
                "targets= for classes"
            )
        if y.dim() not in (1, 2) or len(y) != batch or not y.numel():
            raise InputError(
                f"targets: expected shape ({batch},) or ({batch}, k) for {batch} inputs; got {tuple(y.shape)}"
            )
        y = check_dense(y, "targets").detach()
        if not (y.is_cuda and capturing()):
            extremes = torch.stack(torch.aminmax(y))
            (deferred or DeferredChecks("loss")).add(extremes, _not_finite)
        return y.squeeze(1) if y.shape == (batch, 1) else y

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Loss per sample, (B,)."""
        if output.shape != labels.shape:
            raise InputError(f"targets: expected one for each output, {tuple(output.shape)}; got {tuple(labels.shape)}")
        squares = (output - labels.to(output.dtype)).square()
        return squares if squares.dim() == 1 else squares.sum(1)

    def decide(self, output: Tensor) -> Tensor:
        """Returns the outputs as they are."""
        return output

    def trivial(self, labels: Tensor) -> Tensor:
        """Returns the variance of the targets, summed over outputs: the loss of the best constant output."""
        return labels.float().var(0, correction=0).sum()

    def __repr__(self) -> str:
        return "targets='values'"


def _not_finite(extremes: Sequence[float]) -> str | None:
    return None if all(map(math.isfinite, extremes)) else "targets: expected finite numbers; some are NaN or infinite"
