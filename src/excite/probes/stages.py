"""What one optimizer step is charged with, from what can be seen before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from excite.errors import InputError
from excite.probes.laws import LawSums, NamedLaw
from excite.probes.updates import (
    Coefficient,
    Products,
    Rule,
    decayed,
    direction_of_sgd,
    moments_of_adam,
    moved,
    plain,
)

Settings = Mapping[str, Any]


class Stages:
    """Splits steps into parts. Two ways: plain SGD with one learning rate and one decay needs only squared gradients
    (and w·g in front of normalizations); everything else works on a copy of the weights before the step."""

    def __init__(
        self, sums: LawSums, norm_sums: LawSums | None, laws: Sequence[NamedLaw], parameters: Sequence[Tensor]
    ):
        self._sums, self._norm_sums, self._laws, self._parameters = sums, norm_sums, laws, parameters
        device = sums.owner.device
        self._is_norm = torch.zeros(sums.count, dtype=torch.float64, device=device)
        for law in laws:
            self._is_norm[law.span] = float(law.group.law == "norm")
        of = {path: i for i, path in enumerate(sums.paths)}
        self._norm_at = [] if norm_sums is None else [of[path] for path in norm_sums.paths]
        self._lead = [of[law.group.producers[0].parameter] for law in laws]  # whose learning rate is that of the law
        self._rule: Rule = "measured"
        self._quick = False
        self._copies: list[Tensor] | None = None
        self._grads: list[Tensor] | None = None
        self._norm_wg: Tensor | None = None
        self._found: tuple[int, list[int]] | None = None  # how many groups the optimizer has, and the group of each
        self._cached: dict[str, tuple[tuple[float, ...], Coefficient]] = {}

    def settings(self, optimizer: torch.optim.Optimizer) -> list[Settings]:
        """The optimizer's settings for every parameter."""
        groups = optimizer.param_groups
        if self._found is None or self._found[0] != len(groups):
            of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
            missing = [i for i, p in enumerate(self._parameters) if id(p) not in of]
            if missing:
                raise InputError(
                    f"conservation: {self._sums.paths[missing[0]]} left the optimizer: start a new ledger for it"
                )
            self._found = len(groups), [of[id(p)] for p in self._parameters]
        return [groups[i] for i in self._found[1]]

    def before(self, rule: Rule, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        settings = self.settings(optimizer)
        different = {id(group): group for group in settings}.values()
        self._rule = rule
        self._quick = (
            rule == "sgd"
            and not closure
            and not any(group["momentum"] for group in different)
            and len({(float(group["lr"]), group["weight_decay"]) for group in different}) == 1
            and all(p.grad is not None and not p.grad.is_sparse for p in self._parameters)
        )
        if self._quick:
            if self._norm_sums is not None:
                norms = [self._parameters[i] for i in self._norm_at]
                self._norm_wg = self._norm_sums.rows(*(_wide(side) for side in ([*norms], [_grad(p) for p in norms])))
            return
        weights = [p.detach() for p in self._parameters]
        if self._copies is None or [c.shape for c in self._copies] != [w.shape for w in weights]:
            self._copies = [torch.empty_like(w) for w in weights]
        torch._foreach_copy_(self._copies, weights)
        # Some implementations add Nesterov's momentum to the gradient in place.
        if rule == "measured" or any(group.get("nesterov") for group in different):
            self._grads = None if closure else [_grad(p).clone() for p in self._parameters]

    def after(self, optimizer: torch.optim.Optimizer, ww: Tensor, value: Tensor) -> dict[str, Tensor]:
        """By part: the change of every law. `ww`: row sums of w·w before the step; `value`: the laws after it."""
        settings = self.settings(optimizer)
        if self._quick:
            return self._plain(settings[0], ww)
        grads = _wide(self._grads if self._grads is not None else [_grad(p) for p in self._parameters])
        self._grads = None
        assert self._copies is not None
        before = _wide(self._copies)
        products = Products(ww, self._sums.rows(before, grads), self._sums.rows(grads, grads))
        trained = [p.grad is not None for p in self._parameters]
        rates = [float(s.get("lr", 0.0)) if t else 0.0 for s, t in zip(settings, trained)]
        rate = self._by_row("rate", rates)
        parts = {"step": self._sums.fold(rate * rate * products.gg)}
        common = self._by_law(rates)
        against = -2 * common * self._sums.fold(products.wg)  # zero for a gradient that obeys the law
        parts["eps"] = against * self._is_norm
        if isinstance(rate, Tensor):
            parts["rates"] = -2 * self._sums.fold(rate * products.wg) - against
        if self._rule == "measured":
            inside = value - self._sums.fold(self._sums.rows(before, before))
            parts["update"] = inside - sum(parts.values()) - against * (1 - self._is_norm)
            return parts
        decay = self._by_row("decay", [float(s["weight_decay"]) for s in settings])
        parts["decay"] = self._sums.fold(decayed(products, rate, decay))
        stage = self._sums.fold(plain(products, rate)) + parts["decay"]
        states = [optimizer.state.get(p, {}) if t else {} for p, t in zip(self._parameters, trained)]
        if self._rule == "sgd":
            u = _wide(direction_of_sgd(states, settings, before, grads))
            now = self._sums.fold(moved(rate, 0.0, ww, self._sums.rows(before, u), self._sums.rows(u, u)))
            return {**parts, "momentum": now - stage}
        return {**parts, **self._adam(states, settings, before, rate, ww, stage)}

    def _plain(self, setting: Settings, ww: Tensor) -> dict[str, Tensor]:
        rate, decay = float(setting["lr"]), float(setting["weight_decay"])
        grads = _wide([_grad(p) for p in self._parameters])
        parts = {"step": self._sums.fold(self._sums.rows(grads, grads)) * rate**2}
        if decay:
            parts["decay"] = self._sums.fold(ww) * (rate * decay * (rate * decay - 2))
        if self._norm_sums is not None and self._norm_wg is not None:
            wg = self._sums_of_norms(self._norm_wg)
            parts["eps"] = -2 * rate * wg
            if decay:
                parts["decay"] = parts["decay"] + 2 * rate**2 * decay * wg
        return parts

    def _adam(
        self,
        states: Sequence[Mapping[str, Any]],
        settings: Sequence[Settings],
        before: list[Tensor],
        rate: Coefficient,
        ww: Tensor,
        stage: Tensor,
    ) -> dict[str, Tensor]:
        # Decoupled decay acts beside the moments, coupled decay inside them.
        apart = [s.get("decoupled_weight_decay", False) for s in settings]
        shrink = self._by_row("shrink", [float(s["weight_decay"]) if a else 0.0 for s, a in zip(settings, apart)])
        moments = moments_of_adam(states, settings, before)
        correction = self._by_row("correction", moments.correction)
        stages = []
        for u in (_wide(moments.first), _wide(moments.scaled)):
            wu, uu = self._sums.rows(before, u) / correction, self._sums.rows(u, u) / (correction * correction)
            stages.append(self._sums.fold(moved(rate, shrink, ww, wu, uu)))
        return {"momentum": stages[0] - stage, "rescaling": stages[1] - stages[0]}

    def _sums_of_norms(self, rows: Tensor) -> Tensor:
        assert self._norm_sums is not None
        found = self._norm_sums.fold(rows)
        return torch.nn.functional.pad(found, (0, self._sums.count - self._norm_sums.count))

    def _by_row(self, name: str, values: list[float]) -> Coefficient:
        """A number per parameter as one number, if they agree, or as one per row."""
        if len(set(values)) == 1:
            return values[0]
        key = tuple(values)
        if name not in self._cached or self._cached[name][0] != key:
            table = torch.tensor(values, dtype=torch.float64).to(self._sums.owner.device)
            self._cached[name] = key, table[self._sums.owner]
        return self._cached[name][1]

    def _by_law(self, values: list[float]) -> Coefficient:
        """The number of the first producer of every law."""
        if len(set(values)) == 1:
            return values[0]
        per_law = torch.empty_like(self._is_norm)
        for law, lead in zip(self._laws, self._lead):
            per_law[law.span] = values[lead]
        return per_law


def _grad(p: Tensor) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    grad = p.grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Half precision is summed in float32."""
    return [t.detach().float() if t.dtype in (torch.float16, torch.bfloat16) else t.detach() for t in tensors]
