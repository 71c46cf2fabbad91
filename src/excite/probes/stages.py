"""What one optimizer step is charged with, from what can be seen before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from excite.errors import InputError
from excite.probes.decay_share import DecayShare
from excite.probes.laws import Derive, LawSums, NamedLaw
from excite.probes.update_parts import (
    Coefficient,
    Moments,
    Products,
    Rule,
    decayed,
    decayed_by,
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
        self._share = DecayShare()
        self._shared = False  # decay acts through a buffer in this step
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
        nesterov = any(group.get("nesterov") for group in different)
        # Some implementations add Nesterov's momentum to the gradient in place; a closure makes it inside the step.
        self._rule = rule = "measured" if closure and nesterov else rule
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
                columns = {"w": [p.detach() for p in norms], "g": [_grad(p) for p in norms]}
                self._norm_wg = self._norm_sums.rows(columns, [("w", "g")])[0]
            return
        weights = [p.detach() for p in self._parameters]
        if self._copies is None:
            self._copies = [torch.empty_like(w) for w in weights]
        torch._foreach_copy_(self._copies, weights)
        states = [optimizer.state.get(p, {}) for p in self._parameters]
        self._shared = rule != "measured" and self._share.before(states, settings, weights)
        if rule == "measured" and closure:  # what the gradient was is not known: all of the step is its update
            self._grads = [torch.zeros_like(w) for w in weights]
        elif rule == "measured" or nesterov:
            self._grads = [_grad(p).clone() for p in self._parameters]

    def after(self, optimizer: torch.optim.Optimizer, ww: Tensor, value: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Row sums of w·w after the step, and by part the change of every law.

        `ww`: the row sums before the step; `value`: the laws before it.
        """
        settings = self.settings(optimizer)
        grads = self._grads if self._grads is not None else [_grad(p) for p in self._parameters]
        self._grads = None
        columns: dict[str, Sequence[Tensor]] = {"after": [p.detach() for p in self._parameters], "g": grads}
        if self._quick:
            rows = self._sums.rows(columns, [("after", "after"), ("g", "g")])
            return rows[0], self._plain(settings[0], self._sums.fold(rows[1]), value)
        assert self._copies is not None
        columns["w"] = self._copies
        trained = [p.grad is not None for p in self._parameters]
        states = [optimizer.state.get(p, {}) if t else {} for p, t in zip(self._parameters, trained)]
        pairs = [("after", "after"), ("w", "g"), ("g", "g")]
        derive, correction = None, [1.0]
        if self._rule == "measured":
            pairs += [("w", "w")]
        elif self._rule == "sgd":
            columns["u"] = direction_of_sgd(states, settings, self._copies, grads)
            pairs += [("w", "u"), ("u", "u")]
        else:
            moments = moments_of_adam(states, settings, self._copies)
            correction, derive = moments.correction, _scale(moments, columns)
            pairs += [("w", "u"), ("u", "u"), ("w", "scaled"), ("scaled", "scaled")]
        if self._shared:
            each = correction * len(states) if len(correction) == 1 else correction
            columns["d"] = self._share.directions(self._copies, settings, trained, each)
            pairs += [("w", "d"), ("g", "d"), ("d", "d")]
        rows = self._sums.rows(columns, pairs, derive)
        rates = [float(s.get("lr", 0.0)) if t else 0.0 for s, t in zip(settings, trained)]
        return rows[0], self._full(settings, rates, self._by_row("correction", correction), ww, rows)

    def state_dict(self) -> dict[str, Tensor]:
        """What decay has in the momentum buffers, by parameter; empty where it has nothing there."""
        return {path: v.clone() for path, v in zip(self._sums.paths, self._share.buffers or [])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pairs = zip(self._sums.paths, self._parameters)
        self._share.buffers = [state[path].to(p).clone() for path, p in pairs] if state else None

    def _plain(self, setting: Settings, gg: Tensor, value: Tensor) -> dict[str, Tensor]:
        rate, decay = float(setting["lr"]), float(setting["weight_decay"])
        parts = {"step": gg * rate**2}
        if decay:
            parts["decay"] = value * (rate * decay * (rate * decay - 2))
        if self._norm_sums is not None and self._norm_wg is not None:
            wg = self._sums_of_norms(self._norm_wg)
            parts["eps"] = -2 * rate * wg
            if decay:
                parts["decay"] = parts["decay"] + 2 * rate**2 * decay * wg
        return parts

    def _full(
        self, settings: list[Settings], rates: list[float], correction: Coefficient, ww: Tensor, rows: Tensor
    ) -> dict[str, Tensor]:
        """Rows of: w·w after the step, w·g, g·g, what the optimizer's rule adds to them, and its decay if in a buffer."""
        fold, rate = self._sums.fold, self._by_row("rate", rates)
        products = Products(ww, rows[1], rows[2])
        parts = {"step": fold(rate * rate * products.gg)}
        against = -2 * self._by_law(rates) * fold(products.wg)  # zero for a gradient that obeys the law
        parts["eps"] = against * self._is_norm
        if isinstance(rate, Tensor):
            parts["rates"] = -2 * fold(rate * products.wg) - against
        if self._rule == "measured":
            parts["update"] = fold(rows[0] - rows[3]) - sum(parts.values()) - against * (1 - self._is_norm)
            return parts
        if self._shared:
            (wd, gd, dd), rows = rows[-3:], rows[:-3]
            parts["decay"] = fold(decayed_by(rate, wd / correction, gd / correction, dd / (correction * correction)))
        else:
            decay = self._by_row("decay", [float(s["weight_decay"]) for s in settings])
            parts["decay"] = fold(decayed(products, rate, decay))
        stages = [fold(plain(products, rate)) + parts["decay"]]
        # Adam's decoupled decay acts beside the moments, coupled decay inside them.
        apart = [float(s["weight_decay"]) * bool(s.get("decoupled_weight_decay")) for s in settings]
        shrink = self._by_row("shrink", apart)
        for wu, uu in zip(rows[3::2], rows[4::2]):
            stages.append(fold(moved(rate, shrink, ww, wu / correction, uu / (correction * correction))))
        names = ("momentum", "rescaling")
        return parts | {name: after - before for name, before, after in zip(names, stages, stages[1:])}

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
        key = tuple(values)
        if "law" not in self._cached or self._cached["law"][0] != key:
            per_law = [
                value for law, lead in zip(self._laws, self._lead) for value in [values[lead]] * law.group.channels
            ]
            self._cached["law"] = key, torch.tensor(per_law, dtype=torch.float64).to(self._is_norm.device)
        return self._cached["law"][1]


def _grad(p: Tensor) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    grad = p.grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


def _scale(moments: Moments, columns: dict[str, Sequence[Tensor]]) -> Derive | None:
    """Add Adam's directions to the columns: "u" is m, "scaled" is m/(√v̂ + ε), computed by block where it can be."""
    columns["u"] = moments.first
    if len({*moments.root}) > 1 or len({*moments.eps}) > 1:
        columns["scaled"] = moments.scaled()
        return None
    columns["v"] = moments.second
    root, eps = moments.root[0], moments.eps[0]

    def derive(flat: dict[str, Tensor], memory: Tensor) -> None:
        torch.sqrt(flat["v"], out=memory).div_(root).add_(eps)
        flat["scaled"] = torch.div(flat["u"], memory, out=memory)

    return derive
