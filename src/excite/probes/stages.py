"""What one optimizer step is charged with, from what can be seen before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from excite.errors import InputError
from excite.probes.decay_share import DecayShare
from excite.probes.laws import Derive, LawSums
from excite.probes.update_parts import (
    Form,
    Moments,
    Rule,
    decayed,
    decayed_by,
    direction_of_sgd,
    from_after,
    less,
    moments_of_adam,
    moved,
    plain,
)

Settings = Mapping[str, Any]
_Key = tuple[float, float, float, float]  # rate, decay, decay beside the moments, correction of the first moment


@dataclass(frozen=True)
class Line:
    """One step, to be booked: row sums of products, and what each counts for in each part.

    Parameters that are trained alike share their coefficients: `owner` says for every parameter which of `forms` and
    `rates` are its own.
    """

    step: int
    products: tuple[str, ...]  # "aa", w·w after the step, is the first
    rows: Tensor  # (products, rows)
    owner: tuple[int, ...]
    forms: tuple[Mapping[str, Form], ...]  # by part; and of "wg", where that is not among the products
    rates: tuple[float, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Lines of one kind are booked together."""
        return self.products, self.owner, self.rows.dtype


class Stages:
    """Splits steps into parts. Two ways: plain SGD with one learning rate and one decay needs only squared gradients
    (and w·g if there are `norms`, laws in front of normalizations); everything else works on a copy of the weights before the
    step."""

    def __init__(self, sums: LawSums, norms: bool, parameters: Sequence[Tensor]):
        self._sums, self._norms, self._parameters = sums, norms, parameters
        self._rule: Rule = "measured"
        self._quick = False
        self._copies: list[Tensor] | None = None
        self._grads: list[Tensor] | None = None
        self._share = DecayShare()
        self._shared = False  # decay acts through a buffer in this step
        self._found: tuple[int, list[int]] | None = None  # how many groups the optimizer has, and the group of each

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
        self._shared = False
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
            and all(float(group["lr"]) * group["weight_decay"] < 0.5 for group in different)  # see `from_after`
            and all(p.grad is not None and not p.grad.is_sparse for p in self._parameters)
        )
        if self._quick:
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

    def after(self, step: int, optimizer: torch.optim.Optimizer) -> Line:
        """The step just made, as a line of the books."""
        settings = self.settings(optimizer)
        grads = self._grads if self._grads is not None else [_grad(p) for p in self._parameters]
        self._grads = None
        columns: dict[str, Sequence[Tensor]] = {"a": [p.detach() for p in self._parameters], "g": grads}
        products, derive = ["aa", "gg"], None
        if self._quick and self._norms:
            products.append("ag")
        trained = [True] * len(settings) if self._quick else [p.grad is not None for p in self._parameters]
        correction = [1.0] * len(settings)
        if not self._quick:
            assert self._copies is not None
            columns["w"] = self._copies
            states = [optimizer.state.get(p, {}) if t else {} for p, t in zip(self._parameters, trained)]
            products.append("wg")
            if self._rule == "measured":
                products.append("ww")
            elif self._rule == "sgd":
                columns["u"] = direction_of_sgd(states, settings, self._copies, grads)
                products += ["wu", "uu"]
            else:
                moments = moments_of_adam(states, settings, self._copies)
                correction, derive = moments.correction, _scale(moments, columns)
                products += ["wu", "uu", "ws", "ss"]
            if self._shared:
                columns["d"] = self._share.directions(self._copies, settings, trained, correction)
                products += ["wd", "gd", "dd"]
        alike: dict[_Key, int] = {}
        keys = map(self._key, settings, trained, correction)
        owner = tuple([alike.setdefault(key, len(alike)) for key in keys])
        rows = self._sums.rows(columns, products, derive)
        forms = tuple(map(self._forms, alike))
        return Line(step, tuple(products), rows, owner, forms, tuple([key[0] for key in alike]))

    def _key(self, setting: Settings, trained: bool, correction: float) -> _Key:
        rate = float(setting.get("lr", 0.0)) if trained else 0.0
        if self._rule == "measured":
            return rate, 0.0, 0.0, 1.0
        decay = float(setting["weight_decay"])
        # Adam's decoupled decay acts beside the moments, coupled decay inside them.
        return rate, decay, decay if setting.get("decoupled_weight_decay") else 0.0, correction

    def _forms(self, key: _Key) -> dict[str, Form]:
        """What the products count for, by part; `rates` and `eps` follow from w·g alone."""
        rate, decay, shrink, correction = key
        step = plain(rate)
        parts = {"step": {"gg": step["gg"]}}
        if self._rule == "measured":
            return parts | {"update": less({"aa": 1.0, "ww": -1.0}, step)}
        parts["decay"] = decayed_by(rate, correction) if self._shared else decayed(rate, decay)
        if self._quick:
            return parts | {"wg": from_after(rate, decay)}
        direction = moved(rate, shrink, correction, "u")
        parts["momentum"] = less(direction, step, parts["decay"])
        if self._rule == "adam":
            parts["rescaling"] = less(moved(rate, shrink, correction, "s"), direction)
        return parts

    def state_dict(self) -> dict[str, Tensor]:
        """What decay has in the momentum buffers, by parameter; empty where it has nothing there."""
        return {path: v.clone() for path, v in zip(self._sums.paths, self._share.buffers or [])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        pairs = zip(self._sums.paths, self._parameters)
        self._share.buffers = [state[path].to(p).clone() for path, p in pairs] if state else None


def _grad(p: Tensor) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    grad = p.grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


def _scale(moments: Moments, columns: dict[str, Sequence[Tensor]]) -> Derive | None:
    """Add Adam's directions to the columns: "u" is m, "s" is m/(√v̂ + ε), computed by block where it can be."""
    columns["u"] = moments.first
    if len({*moments.root}) > 1 or len({*moments.eps}) > 1:
        columns["s"] = moments.scaled()
        return None
    columns["v"] = moments.second
    root, eps = moments.root[0], moments.eps[0]

    def derive(flat: dict[str, Tensor], memory: Tensor) -> None:
        torch.sqrt(flat["v"], out=memory).div_(root).add_(eps)
        flat["s"] = torch.div(flat["u"], memory, out=memory)

    return derive
