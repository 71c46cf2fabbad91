"""The conservation laws of a model as sums over entries of its parameters, one number per channel.

A law is Σ w² over what makes a channel minus Σ w² over what reads it, each as often as `site.times` says. The same signed sum of products w·g, g·g, … is what
a step changes it by, so all of them go through `LawSums`: products of whole parameters, sums over rows, one index_add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from excite.errors import InputError
from excite.wiring.channels.slots import Slot
from excite.wiring.groups import Group, Site

Rows = Callable[[Tensor], Callable[[], Tensor]]  # from memory (k, entries) to what sums it up into (k, channels)
Columns = Mapping[str, Sequence[Tensor]]
Derive = Callable[[dict[str, Tensor], Tensor], None]
_Use = tuple[
    Slot, str, int, int
]  # a side of a slot, how often it counts, and the number of the law that its rows count for
_WIDE = {torch.float32, torch.float64}
# Small parameters are handled together up to so many entries, larger ones alone: on a CPU what fits its cache, elsewhere
# what keeps the number of kernels low.
_BLOCK = {"cpu": 1 << 16}
_LARGE_BLOCK = 1 << 20


@dataclass(frozen=True)
class NamedLaw:
    """A channel group with a name of its own, and where its channels stand among the channels of all laws."""

    name: str
    group: Group
    start: int
    earlier: str = ""  # its name in the states of earlier versions

    @property
    def span(self) -> slice:
        """Columns of the law's channels among those of all laws."""
        return slice(self.start, self.start + self.group.channels)


def check_wiring(sites: Sequence[Site], parameters: Mapping[str, Tensor]) -> None:
    """Refuse sites that the parameters do not have."""
    for site in sites:
        result = parameters.get(site.parameter)
        try:
            if result is not None:
                site.rows(result.detach())
                continue
        except (RuntimeError, IndexError):
            pass
        problem = "there is none" if result is None else f"here it has shape {tuple(result.shape)}"
        raise InputError(f"conservation: the wiring is that of another model: it has {site.parameter}, and {problem}")


@dataclass
class _Block:
    """Some parameters whose entries are handled as one vector, and their sites: (first entry, last entry, row sums)."""

    members: list[int]
    sites: list[tuple[int, int, Rows]]
    size: int = 0


class LawSums:
    """Signed sums over the sites of laws. `paths` are the parameters involved, `count` the channels of all laws."""

    def __init__(self, laws: Sequence[NamedLaw], shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self.count = max((law.span.stop for law in laws), default=0)
        targets: dict[str, dict[_Use, Tensor]] = {}
        none = 2 * self.count
        for law in laws:
            for members, start in ((law.group.producers, law.start), (law.group.consumers, self.count + law.start)):
                for site in members:
                    _aim(site, start, targets.setdefault(site.parameter, {}), none)
        # Parameters of one shape stand side by side, so that one operation sums the rows of all of them.
        together: dict[object, list[str]] = {}
        for path, sites in targets.items():
            signature = shapes[path], tuple(_sum_key(use, path) for use in sites)
            together.setdefault(signature, []).append(path)
        self.paths = [path for alike in together.values() for path in alike]
        number = {path: i for i, path in enumerate(self.paths)}
        self._blocks: list[_Block] = []
        max_block = _BLOCK.get(device.type, _LARGE_BLOCK)
        result: list[tuple[int, Tensor, int]] = []
        for alike in together.values():
            shape = shapes[alike[0]]
            size = math.prod(shape)
            few = max(1, max_block // max(1, size))
            for some in (alike[i : i + few] for i in range(0, len(alike), few)):
                if not self._blocks or self._blocks[-1].size + size * len(some) > max_block:
                    self._blocks.append(_Block([], []))
                block = self._blocks[-1]
                start = block.size
                block.size += size * len(some)
                block.members += [number[path] for path in some]
                for k, (slot, side, times, _) in enumerate(targets[some[0]]):
                    block.sites.append((start, block.size, _row_sums(slot, side, shape)))
                    for path in some:
                        target = list(targets[path].values())[k].repeat_interleave(_entries(slot, side))
                        result.append((number[path], target, times))
        empty = [torch.zeros(0, dtype=torch.long)]
        # (rows,): which parameter a row belongs to, and which channel it counts for: channels as made, then as read
        self.parameter_index = torch.cat([torch.full((len(target),), n) for n, target, _ in result] or empty).to(device)
        self._target = torch.cat([target for _, target, _ in result] or empty).to(device)
        self._times: Tensor | None = None  # (rows, 1): how often, where that is not once for all
        if any(times != 1 for *_, times in result):
            counts = [torch.full((len(target), 1), times, dtype=torch.float64) for _, target, times in result]
            self._times = torch.cat(counts).to(device)
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], tuple[int, tuple[Tensor, ...], list[Callable[[], Tensor]]]] = {}

    def rows(self, columns: Columns, pairs: Sequence[str], derive: Derive | None = None) -> Tensor:
        """(pairs, rows): Σ a·b over the entries of every row, for each pair "ab" of columns.

        A column is a list of tensors in the order of `paths`; `derive` may add one to those of a block, in memory that it
        is given.
        """
        result = []
        for number, block in enumerate(self._blocks):
            flat = {name: self._flat(name, block, tensors) for name, tensors in columns.items()}
            dtype = flat[pairs[0][0]].dtype
            if derive is not None:
                derive(flat, self._buffer("derived", dtype, block.size))
            products, sums = self._memory(number, len(pairs), dtype)
            for row, pair in zip(products, pairs):
                torch.mul(flat[pair[0]], flat[pair[1]], out=row)
            result += [rows() for rows in sums]
        return torch.cat(result, 1) if result else torch.zeros(len(pairs), 0, device=self._device)

    def _memory(
        self, number: int, pairs: int, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], list[Callable[[], Tensor]]]:
        """Where the products of a block go, a vector for each pair, and what sums them up. Kept: views cost as much as sums."""
        block, size = self._blocks[number], max(block.size for block in self._blocks)
        buffer = self._buffer("products", dtype, pairs * size)
        key = number, pairs, dtype
        if key not in self._views or self._views[key][0] != buffer.data_ptr():
            own = buffer.narrow(0, 0, pairs * block.size).view(pairs, block.size)
            sums = [rows(own[:, start:stop]) for start, stop, rows in block.sites]
            self._views[key] = buffer.data_ptr(), own.unbind(), sums
        return self._views[key][1:]

    def _flat(self, name: str, block: _Block, tensors: Sequence[Tensor]) -> Tensor:
        """The entries of a block's parameters as one vector, half precision widened."""
        flat = [tensors[i].reshape(-1) for i in block.members]
        dtypes = {tensor.dtype for tensor in flat}
        if len(dtypes) > 1 or not dtypes <= _WIDE:
            wide = torch.float64 if torch.float64 in dtypes else torch.float32
            flat = [tensor.to(wide) for tensor in flat]
        if any(tensor.device != self._device for tensor in flat):
            flat = [tensor.to(self._device) for tensor in flat]
        if len(flat) == 1:
            return flat[0]
        return torch.cat(flat, out=self._buffer(name, flat[0].dtype, block.size))

    def _buffer(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        """Memory that stays: to allocate as much at every step costs more than the arithmetic."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return buffer.narrow(0, 0, size)

    def fold(self, rows: Tensor) -> Tensor:
        """(..., count): sums over rows, producers minus consumers, in float64."""
        made, read = self.sides(rows)
        return made - read

    def size(self, rows: Tensor) -> Tensor:
        """(..., count): sums over rows of all sites, producers plus consumers."""
        made, read = self.sides(rows)
        return made + read

    def sides(self, rows: Tensor, groups: Tensor | None = None, count: int = 1) -> tuple[Tensor, Tensor]:
        """Sums over the rows of producers, and over those of consumers, (..., count) in float64.

        With `groups`, a number below `count` for every row, (..., groups, channels): the rows of each apart.
        """
        wide = 2 * self.count + 1  # the last one collects rows without a law
        target = self._target if groups is None else self._target + wide * groups
        num_sums = math.prod(rows.shape[:-1])
        flat = torch.empty(rows.shape[-1], num_sums, dtype=torch.float64, device=self._device)
        flat.copy_(rows.reshape(num_sums, rows.shape[-1]).T)  # what is added together lies together
        if self._times is not None:
            flat *= self._times
        total = torch.zeros(count * wide, num_sums, dtype=torch.float64, device=self._device)
        total.index_add_(0, target, flat)
        shape = (*rows.shape[:-1], wide) if groups is None else (*rows.shape[:-1], count, wide)
        total = total.T.reshape(shape)
        return total[..., : self.count], total[..., self.count : -1]


def _aim(site: Site, start: int, uses: dict[_Use, Tensor], none: int) -> None:
    """Add the channels of a site to what its rows count for. Rows that count for another law already are summed once more."""
    index = torch.tensor(site.index)
    turn = 0
    while True:
        target = uses.setdefault((site.slot, site.side, site.times, turn), torch.full((site.of,), none))
        if bool((target[index] == none).all()):
            target[index] = torch.arange(start, start + len(index))[:, None].expand_as(index)
            return
        turn += 1


def _plain(slot: Slot) -> bool:
    return not slot.source.steps and slot.order is None


def _sum_key(use: _Use, path: str) -> object:
    """Equal for sites whose rows are summed in the same way; anything unusual is like itself alone."""
    slot, side, times, turn = use
    return (slot.shape, slot.swapped, side, times, turn) if _plain(slot) else (path, side, times, turn)


def _row_sums(slot: Slot, side: str, shape: tuple[int, ...]) -> Rows:
    """Row sums of parameters of one kind that stand side by side, by the cheapest reshape.

    Anything unusual goes through the slot. A row may come as several sums, `_entries` of them, which are added up later.
    """
    _, first, second, kernel = slot.shape
    if not _plain(slot):
        axes = (2, 3) if side == "out" else (1, 3)
        return lambda m: lambda: torch.stack([slot.canonical(matrix.view(shape)).sum(axes).flatten() for matrix in m])
    rows = _neighbours(slot, side)
    if not rows:  # over the first axis, which leaves neighbours together
        return lambda memory: _flat_sum(memory.view(len(memory), -1, first, second * kernel))
    if rows == 1:
        return lambda memory: memory.clone  # used again
    return lambda memory: partial(memory.view(len(memory), -1, rows).sum, 2)


def _neighbours(slot: Slot, side: str) -> int:
    """How many entries make up a row, where they lie side by side; otherwise 0."""
    _, first, second, kernel = slot.shape
    if (side == "out") != slot.swapped:  # the first of the two axes is kept
        return second * kernel
    return kernel if first == 1 else 0


def _entries(slot: Slot, side: str) -> int:
    """How many sums a row comes in."""
    return slot.shape[3] if _plain(slot) and not _neighbours(slot, side) else 1


def _flat_sum(view: Tensor) -> Callable[[], Tensor]:
    return lambda: view.sum(2).flatten(1)
