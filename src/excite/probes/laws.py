"""The conservation laws of a model as sums over entries of its parameters, one number per channel.

A law is Σ w² over what makes a channel minus Σ w² over what reads it. The same signed sum of products w·g, g·g, … is what
a step changes it by, so all of them go through `LawSums`: products of whole parameters, sums over rows, one index_add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite.wiring.channels.slots import Slot
from excite.wiring.groups import Group, Site

Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NamedLaw:
    """A channel group with a name of its own, and where its channels stand among the channels of all laws."""

    name: str
    group: Group
    start: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.group.channels)


def named(groups: Iterable[Group]) -> list[tuple[str, Group]]:
    """Groups under the name of their first producer; further ones of the same layer are `name#2`, `name#3`, …"""
    counts: dict[str, int] = {}
    result = []
    for group in groups:
        layer = group.producers[0].layer
        counts[layer] = counts.get(layer, 0) + 1
        result.append((layer if counts[layer] == 1 else f"{layer}#{counts[layer]}", group))
    return result


class LawSums:
    """Signed sums over the sites of laws. `paths` are the parameters involved, `count` the channels of all laws."""

    def __init__(self, laws: Sequence[NamedLaw], shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self.count = max((law.span.stop for law in laws), default=0)
        self.paths: list[str] = []
        self._rows: list[tuple[int, Rows]] = []
        targets: dict[tuple[Slot, str], tuple[Tensor, Tensor]] = {}
        for law in laws:
            for sites, sign in ((law.group.producers, 1.0), (law.group.consumers, -1.0)):
                for site in sites:
                    if (site.slot, site.side) not in targets:
                        targets[site.slot, site.side] = (torch.full((site.of,), self.count), torch.zeros(site.of))
                    self._aim(site, law.start, sign, *targets[site.slot, site.side])
        owners = []
        for (slot, side), (target, _) in targets.items():
            if slot.held.path not in self.paths:
                self.paths.append(slot.held.path)
            owner = self.paths.index(slot.held.path)
            self._rows.append((owner, _row_sums(slot, side, shapes[slot.held.path])))
            owners.append(torch.full((len(target),), owner))
        empty = [torch.zeros(0, dtype=torch.long)]
        self.owner = torch.cat(owners or empty).to(device)  # (rows,): which parameter a row belongs to
        self._target = torch.cat([target for target, _ in targets.values()] or empty).to(device)
        self._sign = torch.cat([sign for _, sign in targets.values()] or empty).to(device, torch.float64)
        self._device = device

    @staticmethod
    def _aim(site: Site, start: int, sign: float, target: Tensor, signs: Tensor) -> None:
        index = torch.tensor(site.index)
        target[index] = torch.arange(start, start + len(index))[:, None].expand_as(index)
        signs[index] = sign

    def rows(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        """(rows,) in float64: Σ first·second over the entries of every row; both are lists in the order of `paths`."""
        return self.row_sums(torch._foreach_mul(list(first), list(second)))

    def row_sums(self, products: Sequence[Tensor]) -> Tensor:
        sums = [rows(products[owner]) for owner, rows in self._rows]
        if any(part.device != self._device for part in sums):
            sums = [part.to(self._device) for part in sums]
        return torch.cat(sums).to(torch.float64)

    def fold(self, rows: Tensor) -> Tensor:
        """(count,): sums over rows, producers minus consumers."""
        return self._add(rows * self._sign)

    def size(self, rows: Tensor) -> Tensor:
        """(count,): sums over rows of all sites, producers plus consumers."""
        return self._add(rows * self._sign.abs())

    def _add(self, rows: Tensor) -> Tensor:
        total = torch.zeros(self.count + 1, dtype=torch.float64, device=self._device)
        return total.index_add_(0, self._target, rows)[:-1]  # the last one collects rows without a law


def _row_sums(slot: Slot, side: str, shape: tuple[int, ...]) -> Rows:
    """Sums over the entries of each channel, by the cheapest reshape; anything unusual goes through the slot."""
    blocks, first, second, kernel = slot.shape
    if slot.held.steps or slot.order is not None:
        axes = (2, 3) if side == "out" else (1, 3)
        return lambda tensor: slot.canonical(tensor).sum(axes).flatten()
    if (side == "out") != slot.swapped:  # the first of the two axes is kept
        if second * kernel == 1:
            return lambda tensor: tensor.reshape(-1)
        return lambda tensor: tensor.reshape(blocks * first, second * kernel).sum(1)
    if first == 1:
        return lambda tensor: tensor.reshape(blocks * second, kernel).sum(1)
    if blocks == 1 and kernel == 1:
        return lambda tensor: tensor.reshape(first, second).sum(0)
    return lambda tensor: tensor.reshape(blocks, first, second, kernel).sum((1, 3)).flatten()
