"""A ledger in a few numbers per law, for all laws at once and without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite.probes.conserved.laws import NamedLaw


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
    """Channels of several laws that stand one behind the other, as rows of one padded matrix."""

    def __init__(self, laws: Sequence[NamedLaw], count: int, device: torch.device):
        self.names = tuple(law.name for law in laws)
        widest = max((law.group.channels for law in laws), default=0)
        index = torch.full((len(laws), widest), count)
        for row, law in zip(index, laws):
            row[: law.group.channels] = torch.arange(law.start, law.span.stop)
        self._index = index.to(device)

    def _rows(self, amount: Tensor) -> Tensor:
        """(..., channels) -> (..., laws, widest), zeros behind."""
        return torch.nn.functional.pad(amount, (0, 1))[..., self._index]

    def digest(self, books: Tensor) -> Digest:
        """books (..., 2 + parts, channels): drift, scale and parts, of one moment or of several."""
        drift, scale, parts = books[..., 0, :], books[..., 1, :], books[..., 2:, :]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        over = self._rows(torch.stack([drift, drift - parts.sum(-2)], -2) / scale[..., None, :]).abs()
        most = over.amax(-1) if over.shape[-1] else over.sum(-1)
        whole = self._rows(drift.square()).sum(-1)[..., None, :]
        made = self._rows(parts * drift[..., None, :]).sum(-1)
        shares = torch.where(whole > 0, made / torch.where(whole > 0, whole, torch.ones_like(whole)), whole * 0)
        occurs = (self._rows(parts) != 0).any(-1)
        return Digest(self.names, most[..., 0, :], most[..., 1, :], shares, occurs)
