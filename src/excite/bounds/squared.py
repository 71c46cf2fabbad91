"""Shared by the theorems on squared error: a ReLU network, the points it was fitted to, and how it was trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from excite._core.calls import check_finite
from excite._core.checks import check_choice, check_number, check_tensor
from excite.bounds.bound import Assumption
from excite.bounds.relu_network import ReluNetwork
from excite.bounds.stability import Descent, Sharpness, as_descent, largest_eigenvalue, stable
from excite.errors import InputError

Loss = Literal["half-sum", "sum", "half-mean", "mean"]


@dataclass(frozen=True)
class FittedNetwork:
    """A network with its points x (N, n) and targets y (N, m), all in double precision.

    `limit` is what the step size allows for the Hessian of ½ Σ ‖f(x_i) − y_i‖², 2/δ in the papers; `gradient` is the norm of
    its gradient relative to √(λ_max Σ(‖f‖² + ‖y‖²)); `kink` is the smallest |w·h + b| / (‖w‖‖h‖ + |b|) over hidden units and
    points.
    """

    network: ReluNetwork
    x: Tensor
    y: Tensor
    signals: list[Tensor]
    limit: float
    sharpness: Sharpness
    gradient: float
    kink: float
    tolerance: float

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Assumptions of every statement on a trained network: converged, stable under the step size, no point on a kink."""
        return (
            Assumption(
                "training has converged",
                self.gradient <= self.tolerance,
                f"relative gradient {self.gradient:.1e}, at most {self.tolerance:.0e}",
            ),
            stable(self.sharpness, self.limit),
            Assumption(
                "no training point lies on a kink",
                self.kink > 16 * self.network.precision,
                f"nearest: {self.kink:.1e} of the size of its terms",
            ),
        )


def fitted(
    network: ReluNetwork, x: Tensor, y: Tensor, descent: float | Descent, loss: Loss, tolerance: float
) -> FittedNetwork:
    """Checks the arguments, and measures sharpness, gradient and distance from kinks of the trained network."""
    outputs = len(network.weights[-1])
    check_tensor(y, "targets", floating=False)
    tolerance = check_number(tolerance, "tolerance", 0)
    check_finite(y, "targets")
    if y.is_complex() or not y.dim() or len(y) != len(x) or y.numel() != len(x) * outputs:
        raise InputError(f"expected targets ({len(x)}, {outputs}), one row per point; got {tuple(y.shape)}")
    x, y = x.detach().double().cpu().flatten(1), y.detach().double().cpu().reshape(len(x), outputs)
    scales = {"half-sum": 1.0, "sum": 2.0, "half-mean": 1 / len(x), "mean": 2 / y.numel()}
    check_choice(loss, "loss", scales)
    with torch.enable_grad():
        copy = network.copied()
        output = copy.signals(x)[-1]
        sharpness = largest_eigenvalue((output - y).square().sum() / 2, copy.parameters(), tolerance=1e-8)
    signals = network.signals(x)
    size = math.sqrt(max(sharpness.value, 0.0) * float(signals[-1].square().sum() + y.square().sum()))
    return FittedNetwork(
        network,
        x,
        y,
        signals,
        as_descent(descent).limit / scales[loss],
        sharpness,
        sharpness.gradient / size if size > 0 else (0.0 if sharpness.gradient == 0 else math.inf),
        _nearest_kink(network, signals),
        tolerance,
    )


def _nearest_kink(network: ReluNetwork, signals: list[Tensor]) -> float:
    nearest = math.inf
    for h, weight, bias in zip(signals, network.weights[:-1], network.biases[:-1]):
        size = h.norm(dim=1, keepdim=True) * weight.norm(dim=1)
        if bias is not None:
            size = size + bias.abs()
        z = F.linear(h, weight, bias).abs()
        ratio = torch.where(size > 0, z / size, 0.0)
        if bias is None:
            # A point that reaches the layer as zero stays zero however the weights move a little: that is no kink.
            ratio = ratio[h.norm(dim=1) > 0]
        if ratio.numel():
            nearest = min(nearest, float(ratio.min()))
    return nearest


@dataclass(frozen=True)
class UnitMoments:
    """Per unit of a layer, over the points that activate it: how many, ‖Σ h‖, extreme eigenvalues of Σ h h'. All (r,)."""

    count: Tensor
    mean: Tensor
    smallest: Tensor
    largest: Tensor
    deficient: tuple[int, ...]  # units whose points do not span the layer's input


def moments(h: Tensor, active: Tensor, scale: Tensor | None = None) -> UnitMoments:
    """Second moments of h (N, d) for each column of `active` (N, r); `scale` (N,) multiplies each point's share."""
    mask = active.to(h.dtype)  # (N, r)
    scaled = h if scale is None else h * scale[:, None]
    count, dimension = mask.sum(0), h.shape[1]
    smallest, largest = [], []
    for column in mask.T:
        rows = scaled[column > 0]
        gram = rows.T @ h[column > 0]
        values = torch.linalg.eigvalsh(gram)
        top = float(values[-1])
        # Less than this is rounding: a singular matrix has no eigenvalue that could be distinguished from zero.
        floor = max(len(rows), dimension) * torch.finfo(h.dtype).eps * top
        bottom = float(values[0])
        smallest.append(bottom - floor if len(rows) >= dimension and bottom > 4 * floor else 0.0)
        largest.append(top)
    low = h.new_tensor(smallest)
    return UnitMoments(
        count,
        (mask.T @ h).norm(dim=1),
        low,
        h.new_tensor(largest),
        tuple(torch.nonzero(low <= 0).flatten().tolist()),
    )


def excited(moments: UnitMoments, inactive: Tensor, location: str) -> Assumption:
    """Every unit that does something is activated by points that span the input of its layer."""
    quiet = set(torch.nonzero(inactive).flatten().tolist())
    bad = [k for k in moments.deficient if k not in quiet]
    never = sum(1 for k in bad if moments.count[k] == 0)
    smallest = min((float(moments.smallest[k]) for k in range(len(inactive)) if k not in quiet), default=math.inf)
    detail = f"smallest eigenvalue {smallest:.3g}"
    if bad:
        shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
        detail = f"{len(bad)} of {len(inactive)} units deficient, {never} never active: {shown}"
    return Assumption(f"the points that activate a unit of {location} span its input, for every unit", not bad, detail)
