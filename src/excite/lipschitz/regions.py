"""The map of linear regions on a two-dimensional slice of the input space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from excite._core.calls import Pick
from excite._core.checks import check_count, check_model, check_pair, check_tensor, check_weights, model_errors, shown
from excite.errors import InputError
from excite.lipschitz.local_constants import local
from excite.lipschitz.signatures import check_bend, check_gradient, points_at_once, signatures

Range = tuple[float, float]
_MAX_CELLS = 10**8


@dataclass(frozen=True)
class RegionMap:
    """Linear regions of a model on a grid of H × W cells in a plane, rows along `up`.

    Attributes:
        across: Coordinates of the columns (W,).
        up: Coordinates of the rows (H,).
        points: Centers of the cells in input space (H, W, ...).
        ids: Numbers of the linear regions (H, W), in the order in which they occur.
        slopes: Local Lipschitz constants (H, W).
        outputs: Outputs at the centers of the cells (H, W, m).

    Example:
        >>> regions = region_map(nn.Linear(2, 1), torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), size=5)
        >>> regions.count, regions.ids.shape
        (1, torch.Size([5, 5]))
    """

    across: Tensor
    up: Tensor
    points: Tensor
    ids: Tensor
    slopes: Tensor
    outputs: Tensor

    @property
    def count(self) -> int:
        """Number of regions that contain the center of a cell."""
        return int(self.ids.max()) + 1

    def borders(self) -> Tensor:
        """Returns a mask (H, W) of the cells whose right or upper neighbour is in another region."""
        borders = torch.zeros_like(self.ids, dtype=torch.bool)
        borders[:, :-1] |= self.ids[:, :-1] != self.ids[:, 1:]
        borders[:-1] |= self.ids[:-1] != self.ids[1:]
        return borders


@model_errors
def region_map(
    model: nn.Module,
    origin: Tensor,
    right: Tensor,
    up: Tensor,
    *,
    across: Range = (-1.0, 1.0),
    upward: Range = (-1.0, 1.0),
    size: int | tuple[int, int] = 200,
    norm: object = "2",
    output: Pick = None,
) -> RegionMap:
    """Maps the linear regions of a piecewise-linear model on the plane origin + a·right + b·up.

    Cells are exact at their centers; a region that contains no center does not appear. Slopes are norms of the whole
    Jacobian, not only along the plane.

    Args:
        model: A piecewise-linear model.
        origin: One input (...), without a batch axis.
        right: Direction of the columns (...).
        up: Direction of the rows (...).
        across: Range of a.
        upward: Range of b.
        size: Cells per side, or (rows, columns).
        norm: Norm of the local constants, as in `local`.
        output: Selects the output of a model that returns a tuple or a dict.

    Returns:
        Regions, local constants and outputs of all cells.

    Raises:
        ModelError: If the model is not piecewise linear; the operator is named.
        InputError: If the shapes of the vectors differ, or there are more than 10⁸ cells.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> regions = region_map(net, torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), size=50)
        >>> regions.count, regions.slopes.shape
    """
    check_weights(check_model(model))
    rows, columns = _grid(size)
    _check_plane(origin, right, up)
    across, upward = check_pair(across, "across"), check_pair(upward, "upward")
    a = _middles(across, columns).to(origin)
    b = _middles(upward, rows).to(origin)
    shape = (1,) * origin.dim()
    points = origin + b.view(-1, 1, *shape) * up + a.view(1, -1, *shape) * right  # (H, W, ...)
    flat = points.reshape(rows * columns, *origin.shape)
    at_once = points_at_once(model, flat, output=output)
    marks, outputs, eps = signatures(model, flat, output=output, at_once=at_once)
    ids, first = _numbered(marks)
    slopes = local(model, flat[first], norm, output=output)[ids]
    ids, outputs = ids.view(rows, columns), outputs.view(rows, columns, -1)
    for axis in (0, 1):
        _check_linear(ids, outputs, axis, eps)
        near, far, change = _pairs(ids, points, outputs, axis)
        check_gradient(model, (near + far) / 2, far - near, change, eps, output=output)
    return RegionMap(a, b, points, ids, slopes.view(rows, columns), outputs)


def _check_plane(origin: Tensor, right: Tensor, up: Tensor) -> None:
    for tensor, name in ((origin, "origin"), (right, "right"), (up, "up")):
        check_tensor(tensor, name)
    if not (origin.shape == right.shape == up.shape):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (origin, right, up))
        raise InputError(f"expected origin, right and up of the same shape, one input each; got {shapes}")


def _grid(size: object) -> tuple[int, int]:
    """Rows and columns."""
    sides = size if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise InputError(f"size: expected cells per side, or (rows, columns); got {shown(size)}")
    rows, columns = (check_count(side, "size") for side in sides)
    if rows * columns > _MAX_CELLS:
        raise InputError(
            f"size: expected at most {_MAX_CELLS} cells in all; got {rows} × {columns}: map a part of the plane"
        )
    return rows, columns


def _check_linear(ids: Tensor, outputs: Tensor, axis: int, eps: float) -> None:
    """Where three cells in a row are in one region, the output in the middle is the mean of the others."""
    count = ids.shape[axis] - 2
    if count < 1:
        return
    left, middle, right = (outputs.narrow(axis, i, count) for i in range(3))
    a, b, c = (ids.narrow(axis, i, count) for i in range(3))
    check_bend((left - 2 * middle + right).abs()[(a == b) & (b == c)], outputs, eps)


def _pairs(ids: Tensor, points: Tensor, outputs: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two neighbouring cells of every region that has some, and how the output changes from one to the other."""
    count = ids.shape[axis] - 1
    a, b = (ids.narrow(axis, i, count).flatten() for i in range(2))
    inside = (a == b).nonzero()[:, 0]
    first = torch.full((int(ids.max()) + 1,), len(a), device=ids.device)
    first = first.scatter_reduce(0, a[inside], inside, "amin")
    chosen = first[first < len(a)]
    low, high = (points.narrow(axis, i, count).flatten(0, 1)[chosen] for i in range(2))
    before, after = (outputs.narrow(axis, i, count).flatten(0, 1)[chosen] for i in range(2))
    return low, high, after - before


def _middles(span: Range, count: int) -> Tensor:
    return span[0] + (torch.arange(count, dtype=torch.float64) + 0.5) * (span[1] - span[0]) / count


def _numbered(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers 0, 1, … in the order in which marks occur, and where each occurs first."""
    _, back = marks.unique(return_inverse=True)
    count = int(back.max()) + 1
    places = torch.arange(len(marks), device=marks.device)
    first = torch.full((count,), len(marks), device=marks.device).scatter_reduce(0, back, places, "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(count, device=marks.device)
    return rank[back], first[order]
