"""Norms of many tensors at every step: of the large ones from a sample of blocks of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LARGE = 1 << 16  # entries of a tensor, above which blocks of its rows are taken
_BLOCKS, _FRACTION = 8, 8  # blocks of rows, and how many times as many rows there are


def local_part(tensor: Tensor) -> Tensor:
    """The tensor, or the shard of it that this process holds."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def sample_blocks(tensor: Tensor) -> tuple[list[Tensor], float]:
    """Views of a tensor and the number of times that its entries outnumber theirs.

    A tensor of at most 65,536 entries is taken as it is; of a larger one eight blocks of rows, spread evenly, with an eighth of its
    entries.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    height = rows // (_BLOCKS * _FRACTION)
    if tensor.numel() <= LARGE or height < 1:
        return [tensor], 1.0
    starts = [round(i * (rows - height) / (_BLOCKS - 1)) for i in range(_BLOCKS)]
    return [tensor[start : start + height] for start in starts], rows / (height * _BLOCKS)


class SampledTensors:
    """Tensors of which sums are estimated from `sample_blocks`; views are kept as long as the tensors stay the same.

    Args:
        tensors: The tensors by path.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.paths = list(tensors)
        self._whole = list(tensors.values())
        parts = [sample_blocks(local_part(one)) for one in self._whole]
        self.views = [view for views, _ in parts for view in views]
        self._factors = torch.zeros(len(parts), len(self.views), dtype=torch.float64)
        column = 0
        for row, (views, factor) in enumerate(parts):
            self._factors[row, column : column + len(views)] = factor
            column += len(views)
        if self.views:
            self._factors = self._factors.to(self.views[0].device)

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the views are still those of these tensors."""
        return len(tensors) == len(self._whole) and all(a is b for a, b in zip(tensors, self._whole))

    def sums(self, views: Sequence[Tensor], order: int) -> Tensor:
        """Σ|x|^order of each tensor, (tensors,) in float64, from views like `views` of it; order 1 or 2."""
        sizes = norms(views, order)
        return self._factors @ (sizes if order == 1 else sizes.square())


def norms(tensors: Sequence[Tensor], order: int) -> Tensor:
    """Norms of several tensors as one vector in float64, accumulated in float32 or better."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    kinds = {(one.dtype, one.device) for one in tensors}
    if len(kinds) > 1:
        return torch.cat([norms([one], order).to(tensors[0].device) for one in tensors])
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    found: Tensor = torch.stack(torch._foreach_norm(list(tensors), order, dtype=wide)).double()
    return found


class ShardSums:
    """Sums over the processes that hold shards of some tensors: nothing for tensors that every process holds.

    Args:
        tensors: The tensors, in the order of the sums.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        sharded = [hasattr(one, "to_local") for one in tensors]
        self._groups: list[Any] = []
        self._weights: Tensor | None = None
        if not any(sharded):
            return
        first: Any = tensors[sharded.index(True)]
        dims = [i for i, place in enumerate(first.placements) if place.is_shard()]
        self._groups = [first.device_mesh.get_group(i) for i in dims]
        size = 1
        for group in self._groups:
            size *= dist.get_world_size(group)
        weights = [1.0 if one else 1.0 / size for one in sharded]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=local_part(first).device)

    def __call__(self, sums: Tensor) -> Tensor:
        """The sums of all processes, (..., tensors); every process calls this. Does not wait for the device."""
        if self._weights is None:
            return sums
        sums = (sums * self._weights).contiguous()
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        return sums
