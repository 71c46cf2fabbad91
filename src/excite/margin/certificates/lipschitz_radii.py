"""Certified lower bounds: no perturbation below them can change the decision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Pick
from excite._core.checks import Norm
from excite.errors import ExciteError, InputError


def certified_radii(f: Tensor, labels: Tensor, threshold: float, lipschitz: float, norm: Norm) -> Tensor:
    """(N,): how far each point is safe if ‖f(x) − f(x')‖ ≤ L ‖x − x'‖, in the norm "inf" or "2" on both sides.

    For "1" the constant is that of the norm "2", since ‖x − x'‖₂ ≤ ‖x − x'‖₁.

    Scalar outputs f (N,): |f − t| / L. Vectors (N, m): (f_label − f_other) / (2L) in "inf", / (√2 L) in "2", since a
    difference of two outputs moves by at most 2 or √2 times as much as the outputs. Zero where misclassified.
    """
    if f.dim() == 1:
        ahead = torch.where(labels == 1, f - threshold, threshold - f)
        factor = 1.0
    else:
        own = f.gather(1, labels[:, None])
        other_outputs = f.scatter(1, labels[:, None], -math.inf)
        ahead = own[:, 0] - other_outputs.amax(1)
        factor = 2.0 if norm == "inf" else math.sqrt(2.0)
    if lipschitz == 0:
        return torch.where(ahead > 0, math.inf, 0.0)
    return (ahead / (factor * lipschitz)).clamp_min(0)


def known_constant(model: nn.Module, example: Tensor, norm: Norm, output: Pick) -> tuple[float | None, str]:
    """The guaranteed Lipschitz constant of the model and where it comes from, or None and why there is none."""
    from excite import lipschitz

    source = "2" if norm == "1" else norm
    try:
        bound: Any = lipschitz.bound(model, example, source, output=output)
    except ExciteError as error:
        return None, str(error)
    value = float(bound.value)
    if not math.isfinite(value):
        return None, "the Lipschitz bound of this model overflows"
    return value, f"Lipschitz bound {value:.4g} of the network in the norm {source!r}"


def check_against(certified: Tensor, values: Tensor, lipschitz: float) -> None:
    """Refuses a constant of the user's that certifies more than the search disproved."""
    wrong = torch.nonzero(certified > values * (1 + 1e-4) + 1e-12)[:, 0]
    if len(wrong):
        i = int(wrong[0])
        raise InputError(
            f"lipschitz={lipschitz:g} is not a Lipschitz constant of this model: point {i} is misclassified at distance "
            f"{float(values[i]):.4g} but would be safe up to {float(certified[i]):.4g}; give a larger one or leave it out"
        )
