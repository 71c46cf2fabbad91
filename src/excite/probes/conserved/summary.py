"""A ledger in a few numbers per law, for all laws at once and without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite.probes.conserved.laws import NamedLaw


@dataclass(frozen=True)
class LawSummary:
    """A few numbers per law, (..., laws).

    `drift` and `residual` are the largest of a channel relative to its squared weights, as `LedgerEntry.moved` and `LedgerEntry.relative`;
    `fractions` (..., terms, laws) as `LedgerEntry.share`, and where a term `occurs`.
    """

    names: tuple[str, ...]
    drift: Tensor
    residual: Tensor
    fractions: Tensor
    occurs: Tensor

    def rows(self) -> list[LawRow]:
        """The numbers of each of several steps, fetched with one transfer."""
        sizes = [self.drift.shape[1], self.residual.shape[1], self.fractions[0].numel(), self.occurs[0].numel()]
        columns = [
            column.reshape(len(column), -1).double()
            for column in (self.drift, self.residual, self.fractions, self.occurs)
        ]
        laws, result = len(self.names), []
        for row in torch.cat(columns, 1).tolist():
            pieces, start = [], 0
            for size in sizes:
                pieces.append(row[start : start + size])
                start += size
            fractions, occurs = ([column[i : i + laws] for i in range(0, len(column), laws)] for column in pieces[2:])
            result.append(LawRow(self.names, pieces[0], pieces[1], fractions, occurs))
        return result


@dataclass(frozen=True)
class LawRow:
    """A `LawSummary` of one step in plain numbers: `fractions` and `occurs` by term, then by law."""

    names: tuple[str, ...]
    drift: list[float]
    residual: list[float]
    fractions: list[list[float]]
    occurs: list[list[float]]


class Summarizer:
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

    def summary(self, state: Tensor) -> LawSummary:
        """state (..., 2 + terms, channels): drift, scale and terms, of one step or of several."""
        drift, scale, terms = state[..., 0, :], state[..., 1, :], state[..., 2:, :]
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        over = self._rows(torch.stack([drift, drift - terms.sum(-2)], -2) / scale[..., None, :]).abs()
        largest = over.amax(-1) if over.shape[-1] else over.sum(-1)
        total = self._rows(drift.square()).sum(-1)[..., None, :]
        made = self._rows(terms * drift[..., None, :]).sum(-1)
        fractions = torch.where(total > 0, made / torch.where(total > 0, total, torch.ones_like(total)), total * 0)
        occurs = (self._rows(terms) != 0).any(-1)
        return LawSummary(self.names, largest[..., 0, :], largest[..., 1, :], fractions, occurs)
