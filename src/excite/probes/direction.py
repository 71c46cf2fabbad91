"""Whether the weights converge in direction: w / ‖w‖, whatever happens to their norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from excite._core.checks import check_count, same_shapes
from excite._core.intercept.affine import clean_path
from excite.errors import InputError, ModelError
from excite.probes.base import Every, Probe, Schedule, StepContext, Values
from excite.probes.findings import Panel


def angle(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Angle in radians between two lists of tensors, each taken as one vector; accurate for small angles too.

    Args:
        one: Tensors.
        other: Tensors of the same shapes.

    Returns:
        The angle, a tensor with one element.

    Raises:
        InputError: If the shapes differ.

    Example:
        >>> from excite.probes import angle
        >>> round(float(angle([torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1.0])])), 4)  # π/4
        0.7854
    """
    first, other = same_shapes(one, other, "tensors")
    result = _angle(first, other)
    if not bool(torch.isfinite(result)):
        raise InputError("expected tensors that are not all zero: zero has no direction")
    return result


def _angle(first: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    lengths = [torch.stack([t.double().square().sum() for t in side]).sum().sqrt() for side in (first, other)]
    pairs = [(a.double() / lengths[0], b.double() / lengths[1]) for a, b in zip(first, other, strict=True)]
    # ‖u − v‖ = 2 sin(angle / 2) for unit vectors: an arc cosine would lose half the digits.
    gap = torch.stack([(a - b).square().sum() for a, b in pairs]).sum().sqrt()
    return 2 * torch.asin((gap / 2).clamp(max=1.0))


class Direction(Probe):
    """Whether the weights converge in direction, whatever happens to their norm.

    Records:
        ``direction/angle[/PARAMETER]``: angle in radians to the weights `window` steps ago (the closest earlier measurement).
        ``direction/total``: angle to the initial weights.
        ``direction/norm``: ‖w‖₂.
        ``direction/smallest``: smallest |wᵢ| / ‖w‖₂, which Assumption 2 requires to stay away from zero.

    An angle that goes to zero while the norm grows is convergence in direction. Copies of the initial weights and of those in the
    window are held.

    Args:
        schedule: When to measure.
        window: Number of steps between the weights that are compared.

    Raises:
        InputError: If `window` is not a positive whole number.

    Example:
        >>> from excite.probes import Direction, Every
        >>> watch = excite.watch(model, probes=[Direction(Every(50), window=500)])
    """

    name = "direction"
    panel = Panel(
        "alignment",
        labels=(
            ("angle", "turned lately, radians"),
            ("total", "turned since the start, radians"),
            ("norm", "norm of the weights"),
        ),
    )
    reduction = "first"

    def __init__(self, schedule: Schedule | None = None, window: int = 100):
        super().__init__(Every(50) if schedule is None else schedule)
        self.window = check_count(window, "Direction: window")
        self._snapshots: list[tuple[int, dict[str, Tensor]]] = []
        self._start: dict[str, Tensor] = {}

    def measure(self, ctx: StepContext) -> Values:
        """Measures the angles between the present weights and earlier ones."""
        weights = {clean_path(path): p.detach() for path, p in ctx.model.named_parameters() if p.requires_grad}
        if not any(w.numel() for w in weights.values()):
            raise ModelError("direction: no parameter has requires_grad=True and elements")
        weights = {path: w for path, w in weights.items() if w.numel()}
        norm = torch.stack([w.double().square().sum() for w in weights.values()]).sum().sqrt()
        if not math.isfinite(float(norm)):
            raise ModelError(f"direction: a weight is not finite at step {ctx.step}")
        self._start = self._start or {path: w.clone() for path, w in weights.items()}
        if self._start.keys() != weights.keys() or any(self._start[k].shape != w.shape for k, w in weights.items()):
            raise ModelError("direction: the parameters are not those of the start")
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= ctx.step - self.window:
            self._snapshots.pop(0)
        values: dict[str, Tensor] = {
            "norm": norm,
            "total": _angle(list(weights.values()), list(self._start.values())),
            "smallest": torch.stack([w.abs().min().double() for w in weights.values()]).min() / norm,
        }
        if self._snapshots and self._snapshots[0][0] <= ctx.step - self.window:
            old = self._snapshots[0][1]
            values["angle"] = _angle(list(weights.values()), list(old.values()))
            values |= {
                f"angle/{path}": _angle([w], [old[path]]) for path, w in weights.items() if bool(old[path].any())
            }
        self._snapshots.append((ctx.step, {path: w.clone() for path, w in weights.items()}))
        return values

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {"start": self._start, "kept": {str(step): weights for step, weights in self._snapshots}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._start = dict(state["start"])
        self._snapshots = [(int(step), dict(weights)) for step, weights in state["kept"].items()]
