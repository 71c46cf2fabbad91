"""The books of a ledger: what every law was, is, and was moved by. Steps are entered many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from excite.probes.laws import LawSums, NamedLaw
from excite.probes.stages import Line
from excite.probes.update_parts import PARTS

_KEPT = ("parts", "start", "value", "scale", "worst", "worst_step", "flagged")


class Books:
    """A number per channel of all laws, on the device. `parts` (parts, channels); `value` is that after the last step
    entered, `worst` the largest rest of a step, which was `worst_step`, `flagged` the first step with a rest too large, or −1.
    """

    def __init__(self, sums: LawSums, laws: Sequence[NamedLaw], rows: Tensor, tolerance: float):
        self._sums, self._tolerance = sums, tolerance
        device, count = sums.owner.device, sums.count
        self.ww: Tensor | None = (
            rows  # row sums of the squared weights after the last step; None: they are to be taken anew
        )
        self.start = self.value = sums.fold(rows)
        self.scale = sums.size(rows)
        self.parts = torch.zeros(len(PARTS), count, dtype=torch.float64, device=device)
        self.worst = torch.zeros_like(self.start)
        self.worst_step = torch.zeros(count, dtype=torch.long, device=device)
        self.flagged = torch.full((count,), -1, dtype=torch.long, device=device)
        norm = [float(law.group.law == "norm") for law in laws for _ in range(law.group.channels)]
        self._is_norm = torch.tensor(norm, dtype=torch.float64).to(device)
        self._norms = any(norm)
        number = {path: i for i, path in enumerate(sums.paths)}
        lead = [number[law.group.producers[0].parameter] for law in laws for _ in range(law.group.channels)]
        self._lead = torch.tensor(lead, dtype=torch.long).to(device)  # the parameter whose rate is that of the law
        self._owners: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def enter(self, lines: Sequence[Line]) -> Tensor:
        """(steps, 2 + parts, channels): drift, scale and parts after each of the steps."""
        found = [self._enter(list(some)) for _, some in groupby(lines, key=lambda line: line.kind)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def now(self, rows: Tensor | None = None) -> Tensor:
        """(2 + parts, channels) after the last step, or with these row sums of squared weights."""
        value = self.value
        if rows is not None:
            value = self._sums.fold(rows)
            self.scale = torch.maximum(self.scale, self._sums.size(rows))
        return torch.cat([(value - self.start)[None], self.scale[None], self.parts])

    def _enter(self, lines: list[Line]) -> Tensor:
        rows = torch.stack([line.rows for line in lines])
        groups, lead = self._grouped(lines[0].owner)
        made, read = self._sums.sides(rows, groups, len(lines[0].forms))  # (steps, products, groups, channels)
        sums = made - read
        value, size = sums[:, 0].sum(1), (made[:, 0] + read[:, 0]).sum(1)
        parts = self._parts_of(lines, sums, groups, lead)
        before = torch.cat([self.value[None], value[:-1]])
        rest = (value - before - parts.sum(1)).abs_()
        scale = torch.cummax(torch.cat([self.scale[None], size]), 0).values[1:]
        self._note(lines[0].step, rest, rest <= self._tolerance * scale)
        for part, last in zip(parts, [self.parts, *parts]):  # torch has no deterministic cumsum on a GPU
            part += last
        self.parts, self.scale, self.value, self.ww = (x[-1].clone() for x in (parts, scale, value, rows[:, 0]))
        return torch.cat([(value - self.start)[:, None], scale[:, None], parts], 1)

    def _parts_of(self, lines: list[Line], sums: Tensor, groups: Tensor, lead: Tensor) -> Tensor:
        """(steps, parts, channels) from (steps, products, groups, channels)."""
        line, names = lines[0], list(lines[0].products)
        if "ww" not in names:  # before a step the weights are what they were after the last one
            assert self.ww is not None
            made, read = self._sums.sides(self.ww, groups, len(line.forms))
            names.append("ww")
            sums = torch.cat([sums, torch.cat([(made - read)[None], sums[:-1, 0]])[:, None]], 1)
        if "ag" in names:
            of = [[[form["wg"][name] for name in ("ag", "gg")] for form in one.forms] for one in lines]
            both = torch.stack([sums[:, names.index(name)] for name in ("ag", "gg")], 2)
            names.append("wg")
            sums = torch.cat([sums, (both * self._told(of)[..., None]).sum(2)[:, None] * self._is_norm], 1)
        parts = sums.new_zeros(len(lines), len(PARTS), sums.shape[-1])
        occur = [part for part in PARTS if any(any(form.get(part, {}).values()) for one in lines for form in one.forms)]
        if occur:
            weights = [
                [[[form[part].get(name, 0.0) for form in one.forms] for name in names] for part in occur]
                for one in lines
            ]
            matrix = self._told(weights)  # (steps, parts, products, groups)
            for i, part in enumerate(occur):
                for k in range(len(names)):
                    if any(any(one[i][k]) for one in weights):  # what does not count is left out: it may be infinite
                        parts[:, PARTS.index(part)] += (sums[:, k] * matrix[:, i, k, :, None]).sum(1)
        if "wg" in names and (self._norms or len(line.forms) > 1):
            wg = sums[:, names.index("wg")]
            rates = self._told([one.rates for one in lines]) * -2
            of_law = rates[:, lead]
            # w·g of a law is zero for a gradient that obeys it.
            parts[:, PARTS.index("eps")] = of_law * wg.sum(1) * self._is_norm
            parts[:, PARTS.index("rates")] = ((rates[..., None] - of_law[:, None]) * wg).sum(1)
        return parts

    def _told(self, numbers: Sequence[Any]) -> Tensor:
        """As a tensor on the device, without waiting for it."""
        here = torch.tensor(numbers, dtype=torch.float64)
        if self._lead.is_cuda:
            here = here.pin_memory()
        return here.to(self._lead.device, non_blocking=True)

    def _grouped(self, owner: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of which group every row is, and the first producer of every channel."""
        if owner not in self._owners:
            table = torch.tensor(owner, dtype=torch.long).to(self._lead.device)
            self._owners = {owner: (table[self._sums.owner], table[self._lead])}
        return self._owners[owner]

    def _note(self, step: int, rest: Tensor, allowed: Tensor) -> None:
        """The largest rest of a channel so far, and the first one that is not allowed; NaN is not. Rows count from `step`."""
        known = torch.where(rest.isnan(), 0.0, rest)
        most = known.argmax(0)
        largest = known.gather(0, most[None])[0]
        larger = largest > self.worst
        self.worst = torch.where(larger, largest, self.worst)
        self.worst_step = torch.where(larger, step + most, self.worst_step)
        first = torch.where(allowed.all(0), -1, step + (~allowed).to(torch.uint8).argmax(0))
        self.flagged = torch.where(self.flagged < 0, first, self.flagged)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).clone() for name in _KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, name, state[name].to(getattr(self, name)).clone())
        self.ww = None
