"""The direction in which the outputs of a sample can be moved most (section 7.1).

    v = argmax over ‖v‖₂ ≤ 1 of max over d ∈ D of v'(f(x; d) − f(x))

For a fixed d the best v is the unit vector along f(x; d) − f(x); for a fixed v the best d of the linearised model is the
steepest one for J'v. Taking turns between the two is the power method on the Jacobian J where D is one ball of the
2-norm (v becomes its top left singular vector), and its analogue for other sets. Both halves of a turn only raise the
objective as long as the model is linear on D. It has to start from some v, since at d = 0 ‖f(x; d) − f(x)‖ has no
gradient; the difference of the two nearest codes (`Codes.start`) is the best start found that costs no pass.

From one start the turns may end at a local maximum. Several starts are compared by what the linearised model reaches,

    reach(v) = Σ_k r_k ‖J_k'v‖*,      ‖·‖* the dual norm, J_k the Jacobian with respect to the perturbation of layer k,

for each sample, and the best is kept. For the 1-norm the best perturbation of one layer is a multiple of the unit vector of
the longest column of r_k J_k, which one backward pass for each output finds: v along it is exact where one layer is
perturbed, and one more start where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.checks import Norm
from excite._core.layout import Layout
from excite.excitation.perturbations import BestValues, dual_norm

COLUMNS = 32  # outputs up to which the longest column is looked for, at one backward pass each

Slopes = dict[str, Tensor]  # by layer, shaped like its perturbation: the gradient of v'f at zero


@dataclass(frozen=True)
class Linearized:
    """The model around d = 0: its outputs (B, k), and what is known of the Jacobian.

    `slopes(v, last)` is J'v by layer, one backward pass, after the `last` of which the graph is freed; `move(slopes)` is
    f(x; d) − f(x) at the steepest d for these slopes, one forward pass; `balls` has the layout and the radius of each layer.
    """

    output: Tensor
    slopes: Callable[[Tensor, bool], Slopes]
    move: Callable[[Slopes], Tensor]
    balls: Mapping[str, tuple[Layout, float | Tensor]]
    norm: Norm

    def reaches(self, slopes: Slopes) -> dict[str, Tensor]:
        """r_k ‖J_k'v‖* of each layer and sample, (B,)."""
        result = {}
        for name, slope in slopes.items():
            layout, radius = self.balls[name]
            result[name] = dual_norm(layout.by_sample(slope, len(self.output)), self.norm) * radius
        return result


def find_direction(
    linearized: Linearized, start: Tensor, slopes: Slopes, alternations: int, starts: int
) -> tuple[Tensor, Slopes]:
    """The direction in which the outputs of each sample move most, and the slopes along it.

    Args:
        linearized: The model.
        start: Where the search begins, unit vectors (B, k); `slopes` are those along it.
        slopes: As said.
        alternations: Turns from each start.
        starts: How many starts; with the 1-norm and at most `COLUMNS` outputs there is one more, unless alternations are 0.
    """
    exact = linearized.norm == "1" and alternations > 0 and linearized.output.shape[1] <= COLUMNS
    further_starts = more_starts(start, starts - 1)
    if exact:
        further_starts.append(longest_column(linearized))
    layouts = {name: layout for name, (layout, _) in linearized.balls.items()}
    best, direction = BestValues(layouts, len(start)), start
    for number, v in enumerate([start, *further_starts]):
        final = number == len(further_starts)
        if number:
            slopes = {**slopes, **linearized.slopes(v, final and not alternations)}
        for alternation in range(alternations):
            v = unit(linearized.move(slopes), otherwise=any_direction(linearized.output))
            slopes = {**slopes, **linearized.slopes(v, final and alternation == alternations - 1)}
        if not further_starts:
            return v, slopes
        total_change = torch.stack(list(linearized.reaches(slopes).values())).sum(0)
        direction = torch.where(best.update(slopes, total_change)[:, None], v, direction)
    return direction, best.values


def longest_column(linearized: Linearized) -> Tensor:
    """The unit vector along J_k e_i for the layer k and the entry i where r_k ‖J_k e_i‖₂ is largest, (B, k)."""
    batch, outputs = linearized.output.shape
    dtype, device = wide(linearized.output), linearized.output.device
    squares: Slopes = {}
    for number in range(outputs):
        basis_vector = torch.zeros(batch, outputs, dtype=dtype, device=device)
        basis_vector[:, number] = 1
        for name, slope in linearized.slopes(basis_vector, False).items():
            square = slope.to(wide(slope)).square()
            squares[name] = squares[name] + square if name in squares else square
    lengths = {name: square.sqrt() for name, square in squares.items()}
    reaches = linearized.reaches(lengths)
    largest = torch.stack(list(reaches.values())).amax(0)
    chosen = {}
    for name, length in lengths.items():
        layout, _ = linearized.balls[name]
        rows = layout.by_sample(length, batch)
        chosen[name] = layout.from_samples(torch.where((reaches[name] == largest)[:, None], rows, 0), length)
    return unit(linearized.move(chosen), otherwise=any_direction(linearized.output))


def more_starts(start: Tensor, count: int) -> list[Tensor]:
    """`count` more unit vectors for each sample, each orthogonal to as many before it as can be; no random numbers."""
    outputs = start.shape[1]
    number = torch.arange(1, outputs + 1, device=start.device, dtype=start.dtype)
    starts = [start]
    for index in range(1, count + 1):
        vector = ((number * number + index) * (1 + index)).cos().expand(start.shape)
        for earlier in starts[max(0, len(starts) - outputs + 1) :]:
            vector = vector - (vector * earlier).sum(1, keepdim=True) * earlier
        starts.append(unit(vector, otherwise=any_direction(start)))
    return starts[1:]


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
