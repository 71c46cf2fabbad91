"""Accumulator of a ledger: the start, the value and the terms of every law. Steps are committed many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from excite.probes.conserved.integrals.squares import SquaresIntegral
from excite.probes.conserved.laws import LawSums, NamedLaw
from excite.probes.conserved.norm_terms import NormTerms
from excite.probes.conserved.step_terms import StepRecord
from excite.probes.conserved.update_terms import PARTS

_STATE = ("parts", "start", "value", "scale", "worst", "worst_step", "flagged")
# Under autocast the gradients of a law are off by so many eps, as a fraction of their norm: weight, input, output and output gradient
# are each rounded once, on the side of the producers and on that of the consumers.
_AUTOCAST = 8.0


class Accumulator:
    """A number per channel of all laws, on the device.

    `parts` (terms, channels); `value` is that after the last step committed, `worst` the largest residual of a step, which was `worst_step`,
    `flagged` the first step with a residual too large, or −1.
    """

    def __init__(
        self,
        sums: LawSums,
        laws: Sequence[NamedLaw],
        rows: Tensor,
        tolerance: float,
        norms: NormTerms | None = None,
    ):
        self._sums, self._tolerance, self._norms = sums, tolerance, norms
        device, count = sums.parameter_index.device, sums.count
        self.ww: Tensor | None = (
            rows  # row sums of the squared weights after the last step; None: they are to be computed again
        )
        self.start = self.value = sums.fold(rows)
        self.scale = sums.size(rows)
        self.parts = torch.zeros(len(PARTS), count, dtype=torch.float64, device=device)
        self.worst = torch.zeros_like(self.start)
        self.worst_step = torch.zeros(count, dtype=torch.long, device=device)
        self.flagged = torch.full((count,), -1, dtype=torch.long, device=device)
        self.integral = SquaresIntegral(self.start)
        law_of = [i for i, law in enumerate(laws) for _ in range(law.group.channels)]
        self._law = torch.tensor(law_of, dtype=torch.long).to(device)
        number = {path: i for i, path in enumerate(sums.paths)}
        self._members = [
            {number[site.parameter] for site in (*law.group.producers, *law.group.consumers)} for law in laws
        ]
        self._owners: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def commit(self, records: Sequence[StepRecord]) -> Tensor:
        """(steps, 2 + terms, channels): drift, scale and terms after each of the steps."""
        result = [self._commit(list(some)) for _, some in groupby(records, key=lambda record: record.batch_key)]
        return result[0] if len(result) == 1 else torch.cat(result)

    @property
    def nbytes(self) -> int:
        """Of one state."""
        return self.parts.nbytes + self.start.nbytes + self.scale.nbytes

    def state(self, rows: Tensor | None = None) -> Tensor:
        """(2 + terms, channels) after the last step, or with these row sums of squared weights."""
        value = self.value
        if rows is not None:
            value = self._sums.fold(rows)
            self.scale = torch.maximum(self.scale, self._sums.size(rows))
        return torch.cat([(value - self.start)[None], self.scale[None], self.parts])

    def _commit(self, records: list[StepRecord]) -> Tensor:
        rows = torch.stack([record.rows for record in records])
        groups, group_matrix = self._grouped(records[0].form_of)
        made, read = self._sums.sides(rows, groups, len(records[0].forms))  # (steps, products, groups, channels)
        sums = made - read
        value, size = sums[:, 0].sum(1), (made[:, 0] + read[:, 0]).sum(1)
        terms_by_name, terms = self._terms_of(records, sums, groups, group_matrix)
        self._integrate(records, sums, group_matrix)
        before = torch.cat([self.value[None], value[:-1]])
        residual = value - before - terms_by_name.sum(1)
        if records[0].missing:  # what is left there was not predicted
            unknown = torch.isin(self._law, self._to_device(list(records[0].missing)).long())
            terms_by_name[:, PARTS.index("update")] += torch.where(unknown, residual, 0.0)
            residual = torch.where(unknown, 0.0, residual)
        scale = torch.cummax(torch.cat([self.scale[None], size]), 0).values[1:]
        allowed = self._tolerance * scale
        if any(any(record.rounding) for record in records):
            rounding = self._to_device([record.rounding for record in records])
            allowed = allowed + rounding[:, :1] * terms + rounding[:, 1:] * size
        if any(record.passes for record in records) and "gg" in records[0].products:
            # w·g = 0 for gradients in exact arithmetic; each of their numbers is off by up to some eps.
            gradients = sum(side[:, records[0].products.index("gg")].sum(1) for side in (made, read))
            passes = self._to_device([2 * max(record.rates) * _AUTOCAST * record.passes for record in records])
            allowed = allowed + passes[:, None] * (size * gradients).sqrt()
        residual = residual.abs()
        self._note(records[0].step, residual, residual <= allowed)
        for term, last in zip(
            terms_by_name, [self.parts, *terms_by_name]
        ):  # torch has no deterministic cumsum on a GPU
            term += last
        self.parts, self.scale, self.value, self.ww = (x[-1].clone() for x in (terms_by_name, scale, value, rows[:, 0]))
        return torch.cat([(value - self.start)[:, None], scale[:, None], terms_by_name], 1)

    def _integrate(self, records: list[StepRecord], sums: Tensor, group_matrix: Tensor) -> None:
        """Moves the integral of the laws on by these steps."""
        products = {name: sums[:, i] for i, name in enumerate(records[0].products)}
        uniform = group_matrix.sum(0) == 1  # all weights of the law have the same settings
        group = torch.where(uniform, group_matrix.argmax(0), -1)[self._law]
        self.integral.advance([record.motions for record in records], products, self._eps_terms(records), group)

    def _terms_of(
        self, records: list[StepRecord], sums: Tensor, groups: Tensor, group_matrix: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(steps, terms, channels) from (steps, products, groups, channels).

        And (steps, channels), the sum of the absolute values of all terms that they are made of.
        """
        record, names = records[0], list(records[0].products)
        if "ww" not in names:  # before a step the weights are what they were after the last one
            assert self.ww is not None
            made, read = self._sums.sides(self.ww, groups, len(record.forms))
            names.append("ww")
            sums = torch.cat([sums, torch.cat([(made - read)[None], sums[:-1, 0]])[:, None]], 1)
        eps = self._eps_terms(records)
        if eps is not None and "wg" not in names and len(record.forms) == 1:
            names.append("wg")  # it is not measured: a gradient that obeys the law has w·g = 0, but for the eps
            sums = torch.cat([sums, eps[:, None, None]], 1)
        terms_by_name = sums.new_zeros(len(records), len(PARTS), sums.shape[-1])
        terms = sums.new_zeros(len(records), sums.shape[-1])
        occur = [
            term
            for term in PARTS
            if any(any(form.get(term, {}).values()) for record in records for form in record.forms)
        ]
        if occur:
            weights = [
                [[[form.get(term, {}).get(name, 0.0) for form in record.forms] for name in names] for term in occur]
                for record in records
            ]
            matrix = self._to_device(weights)  # (steps, terms, products, groups)
            for i, term_name in enumerate(occur):
                for k in range(len(names)):
                    if any(
                        any(weight[i][k]) for weight in weights
                    ):  # what does not count is left out: it may be infinite
                        term = (sums[:, k] * matrix[:, i, k, :, None]).sum(1)
                        terms_by_name[:, PARTS.index(term_name)] += term
                        terms += term.abs()
        if eps is not None or len(record.forms) > 1:
            rates = self._to_device([record.rates for record in records])
            # The largest rate of the law: with that of a layer which does not move, nothing would be left to check.
            of_law = (rates[:, :, None] * group_matrix).amax(1)[:, self._law]
            if eps is not None:
                terms_by_name[:, PARTS.index("eps")] = -2 * of_law * eps
            if "wg" in names and len(record.forms) > 1:
                wg = sums[:, names.index("wg")]
                terms_by_name[:, PARTS.index("rates")] = -2 * ((rates[..., None] - of_law[:, None]) * wg).sum(1)
        return terms_by_name, terms

    def _eps_terms(self, records: list[StepRecord]) -> Tensor | None:
        """(steps, channels): what w·g of a law in front of a normalization is because of its eps."""
        if self._norms is None or records[0].terms is None or "gg" not in records[0].products:
            return None
        terms = torch.stack([record.terms for record in records if record.terms is not None]).double()
        terms = terms[:, self._norms.position] * self._norms.sign
        return terms.new_zeros(len(records), self._sums.count).index_add_(1, self._norms.channel, terms)

    def _to_device(self, numbers: Sequence[Any]) -> Tensor:
        """As a tensor on the device, without waiting for it."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self._law.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self._law.device, non_blocking=True)

    def _grouped(self, forms: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of which group every row is, and (groups, laws) whether a group takes part in a law."""
        if forms not in self._owners:
            device = self._law.device
            table = torch.tensor(forms, dtype=torch.long).to(device)
            group_matrix = torch.zeros(1 + max(forms, default=0), len(self._members), dtype=torch.float64)
            for law, members in enumerate(self._members):
                group_matrix[[forms[i] for i in members], law] = 1.0
            self._owners = {forms: (table[self._sums.parameter_index], group_matrix.to(device))}
        return self._owners[forms]

    def _note(self, step: int, residual: Tensor, allowed: Tensor) -> None:
        """The largest residual of a channel so far, and the first one that is not allowed; NaN is not. Rows count from `step`."""
        known = torch.where(residual.isnan(), 0.0, residual)
        maximum = known.argmax(0)
        largest = known.gather(0, maximum[None])[0]
        larger = largest > self.worst
        self.worst = torch.where(larger, largest, self.worst)
        self.worst_step = torch.where(larger, step + maximum, self.worst_step)
        first = torch.where(allowed.all(0), -1, step + (~allowed).to(torch.uint8).argmax(0))
        self.flagged = torch.where(self.flagged < 0, first, self.flagged)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {name: getattr(self, name).clone() for name in _STATE} | {"integral": self.integral.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        for name in _STATE:
            setattr(self, name, state[name].to(getattr(self, name)).clone())
        self.integral.load_state_dict(state.get("integral"))
        self.ww = None
