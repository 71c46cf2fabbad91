"""A ledger in a few numbers per law, for all laws at once and without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite.probes.laws import NamedLaw


@dataclass(frozen=True)
class Digest:
    """By law (..., laws): `drift` and `rest` are the largest of a channel relative to its squared weights, as `Entry.moved` and
    `Entry.relative`; `shares` (..., parts, laws) as `Entry.share`, and where a part `occurs`."""

    names: tuple[str, ...]
    drift: Tensor
    rest: Tensor
    shares: Tensor
    occurs: Tensor


class Digester:
    """Numbers per channel made into numbers per law."""

    def __init__(self, laws: Sequence[NamedLaw], device: torch.device):
        self.names = tuple(law.name for law in laws)
        owner = [number for number, law in enumerate(laws) for _ in range(law.group.channels)]
        self._owner = torch.tensor(owner, dtype=torch.long).to(device)

    def _sum(self, amount: Tensor) -> Tensor:
        """(..., channels) -> (..., laws)."""
        return amount.new_zeros(*amount.shape[:-1], len(self.names)).index_add_(-1, self._owner, amount)

    def _most(self, amount: Tensor) -> Tensor:
        """The same, the largest of what is not negative."""
        result = amount.new_zeros(*amount.shape[:-1], len(self.names))
        return result.scatter_reduce_(-1, self._owner.expand_as(amount), amount, "amax")

    def digest(self, books: Tensor) -> Digest:
        """books (..., 2 + parts, channels): drift, scale and parts, of one moment or of several."""
        drift, scale, parts = books[..., 0, :], books[..., 1, :], books[..., 2:, :]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        over = (torch.stack([drift, drift - parts.sum(-2)], -2) / scale[..., None, :]).abs_()
        most = self._most(over)
        amounts = self._sum(torch.cat([drift[..., None, :], parts], -2) * drift[..., None, :])
        whole, made = amounts[..., :1, :], amounts[..., 1:, :]
        shares = torch.where(whole > 0, made / torch.where(whole > 0, whole, 1.0), whole * 0)
        occurs = self._most((parts != 0).to(books.dtype)) > 0
        return Digest(self.names, most[..., 0, :], most[..., 1, :], shares, occurs)
