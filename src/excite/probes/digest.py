"""A ledger in a few numbers per law, for all laws at once and without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite.probes.laws import NamedLaw


@dataclass(frozen=True)
class Digest:
    """By law (laws,): `drift` and `rest` are the largest of a channel relative to its squared weights, as `Entry.moved` and
    `Entry.relative`; `shares` (parts, laws) as `Entry.share`, and where a part `occurs`."""

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

    def digest(self, drift: Tensor, parts: Tensor, scale: Tensor) -> Digest:
        """drift and scale (channels,), parts (parts, channels)."""
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        over = self._rows(torch.stack([drift, drift - parts.sum(0)]) / scale).abs()
        most = over.amax(-1) if over.shape[-1] else over.sum(-1)
        whole = self._rows(drift.square()).sum(-1)
        made = self._rows(parts * drift).sum(-1)
        shares = torch.where(whole > 0, made / torch.where(whole > 0, whole, torch.ones_like(whole)), whole * 0)
        return Digest(self.names, most[0], most[1], shares, (self._rows(parts) != 0).any(-1))
