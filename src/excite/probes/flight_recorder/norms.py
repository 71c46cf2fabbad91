"""Norms of many tensors at every step: of the large ones from a sample of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from excite._core.distributed import local_shard

LARGE = 1 << 16  # entries of a tensor, above which blocks of it are taken
_BLOCKS = 8
_ROW = 4096  # entries of a row of the sample, and of a block


def sample_blocks(tensor: Tensor) -> tuple[list[Tensor], float]:
    """Views of a tensor and the ratio of its number of entries to theirs.

    A tensor of at most 65,536 entries is taken as it is. Of a larger one eight blocks of entries that lie side by side, spread evenly,
    with 4,096 entries each.
    """
    size = tensor.numel()
    if size <= LARGE or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return [tensor], 1.0
    flat = tensor.as_strided((size,), (1,))  # in the order of its memory
    starts = [round(i * (size - _ROW) / (_BLOCKS - 1)) for i in range(_BLOCKS)]
    return [flat[start : start + _ROW] for start in starts], size / (_ROW * _BLOCKS)


class SampledTensors:
    """Tensors of which sums are estimated from `sample_blocks`, read with a few kernels for all of them.

    Blocks are copied to the rows of one matrix, the last row of each filled up with zeros.

    Args:
        tensors: The tensors by path.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.paths = list(tensors)
        self._tensors = list(tensors.values())
        parts = [sample_blocks(local_shard(tensor)) for tensor in self._tensors]
        counts = [[max(1, -(-view.numel() // _ROW)) for view in views] for views, _ in parts]
        first = parts[0][0][0] if parts else torch.zeros(0)
        dtype = torch.float32
        for view in (view for views, _ in parts for view in views):
            dtype = torch.promote_types(dtype, view.dtype)
        self._rows = first.new_zeros(sum(map(sum, counts)), _ROW, dtype=dtype)
        factors = torch.zeros(len(parts), len(self._rows), dtype=torch.float64)
        self._targets: list[Tensor] = []
        row = 0
        for i, ((views, factor), heights) in enumerate(zip(parts, counts)):
            factors[i, row : row + sum(heights)] = factor
            for view, height in zip(views, heights):
                flat = self._rows[row : row + height].view(-1)[: view.numel()]
                self._targets.append(
                    flat.as_strided(view.shape, view.stride()) if _packed(view) else flat.view(view.shape)
                )
                row += height
        self._factors = factors.to(first.device)
        self._views = [view for views, _ in parts for view in views]
        self._pointers = self._addresses()

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are still the tensors."""
        return len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors))

    def read(self) -> Tensor:
        """The sample as it is now, (rows, entries) in float32 or better; the same memory each time."""
        if self._pointers != (pointers := self._addresses()):  # memory was replaced, as by p.data = ...
            self._views = [view for tensor in self._tensors for view in sample_blocks(local_shard(tensor))[0]]
            self._pointers = pointers
        if self._views:
            torch._foreach_copy_(self._targets, self._views)
        return self._rows

    def sums(self, rows: Tensor, order: int) -> Tensor:
        """Σ|x|^order of each tensor, (tensors,) in float64, from a sample like that of `read`; order 1 or 2."""
        sizes: Tensor = torch.linalg.vector_norm(rows, order, 1).double()
        return self._factors @ (sizes if order == 1 else sizes.square())

    def _addresses(self) -> list[int]:
        return [0 if hasattr(tensor, "to_local") else tensor.data_ptr() for tensor in self._tensors]


def _packed(view: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(view))


def norms(tensors: Sequence[Tensor], order: int) -> Tensor:
    """Norms of several tensors as one vector in float64, accumulated in float32 or better."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    layouts = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(layouts) > 1:
        return torch.cat([norms([tensor], order).to(tensors[0].device) for tensor in tensors])
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    result: Tensor = torch.stack(torch._foreach_norm(list(tensors), order, dtype=wide)).double()
    return result


class ShardSums:
    """Sums over the processes that hold shards of some tensors: nothing for tensors that every process holds.

    Args:
        tensors: The tensors, in the order of the sums.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        sharded = [hasattr(tensor, "to_local") for tensor in tensors]
        self._groups: list[Any] = []
        self._weights: Tensor | None = None
        if not any(sharded):
            return
        first: Any = tensors[sharded.index(True)]
        dims = [i for i, placement in enumerate(first.placements) if placement.is_shard()]
        self._groups = [first.device_mesh.get_group(i) for i in dims]
        size = 1
        for group in self._groups:
            size *= dist.get_world_size(group)
        weights = [1.0 if is_sharded else 1.0 / size for is_sharded in sharded]
        self._weights = torch.tensor(weights, dtype=torch.float64, device=local_shard(first).device)

    def __call__(self, sums: Tensor) -> Tensor:
        """The sums of all processes, (..., tensors); every process calls this. Does not wait for the device."""
        if self._weights is None:
            return sums
        sums = (sums * self._weights).contiguous()
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        return sums
