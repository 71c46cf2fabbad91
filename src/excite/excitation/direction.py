"""The direction in which the outputs of a sample can be moved most (section 7.1).

    v = argmax over ‖v‖₂ ≤ 1 of max over d ∈ D of v'(f(x; d) − f(x))

For a fixed d the best v is the unit vector along f(x; d) − f(x); for a fixed v the best d of the linearised model is the
steepest one for J'v. Taking turns between the two is the power method on the Jacobian J where D is one ball of the
2-norm (v becomes its top left singular vector), and its analogue for other sets. Both halves of a turn only raise the
objective as long as the model is linear on D. It has to start from some v, since at d = 0 ‖f(x; d) − f(x)‖ has no
gradient; the difference of the two nearest codes (`Codes.start`) is the best start found that costs no pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def any_direction(output: Tensor) -> Tensor:
    """A fixed unit vector for each sample, like `output` (B, k): no entry stands out, none is zero, none are equal.

    The same for every sample, so that a point does not depend on its place in the batch; computed on the device.
    """
    number = torch.arange(1, output.shape[1] + 1, device=output.device, dtype=wide(output))
    vector = (number * number).cos()  # the phases j² are equidistributed: as good as random, and the same everywhere
    direction: Tensor = vector / vector.norm()
    return direction.expand(output.shape)


def unit(move: Tensor, otherwise: Tensor) -> Tensor:
    """move/‖move‖ for each sample; `otherwise` where nothing moved."""
    # Scaled by the largest entry first: squares of tiny moves underflow.
    largest = move.abs().amax(1, keepdim=True)
    move = move / torch.where(largest > 0, largest, 1)
    length = move.norm(dim=1, keepdim=True)
    return torch.where(length > 0, move / torch.where(length > 0, length, 1), otherwise)


def wide(output: Tensor) -> torch.dtype:
    """At least float32: the precision in which outputs are compared."""
    return torch.promote_types(output.dtype, torch.float32)
