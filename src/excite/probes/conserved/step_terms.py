"""Terms of one optimizer step, from the state before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from excite.errors import InputError
from excite.probes.conserved.decay_fraction import DecayShare
from excite.probes.conserved.hyperparameters import Hyperparameters, Settings
from excite.probes.conserved.integrals.squares import Motion
from excite.probes.conserved.laws import Derive, LawSums
from excite.probes.conserved.norm_terms import NormTerms
from excite.probes.conserved.unchecked import Reason
from excite.probes.conserved.update_terms import (
    Form,
    OptimizerMoments,
    UpdateRule,
    decayed,
    decayed_by,
    direction_of_sgd,
    less,
    moments_of_adam,
    moved,
    plain,
    quotients,
)

_Key = tuple[float, float, float, float]  # rate, decay, decay beside the moments, correction of the first moment


@dataclass(frozen=True)
class StepRecord:
    """One step, to be added to the ledger: row sums of products, and what each counts for in each term.

    Parameters that are trained alike share their coefficients: `form_of` says for every parameter which of `forms` and
    `rates` are its own. `terms` are those of `NormTerms`; `missing` are the laws whose terms are not known. `rounding`: relative
    errors of what the optimizer computes of its settings, in general and in 1 − ηλ. `passes`: the machine epsilon of autocast,
    where the gradients were computed under it. `motions`: by form, the settings of SGD from which laws can be integrated.
    """

    step: int
    products: tuple[str, ...]  # "aa", w·w after the step, is the first
    rows: Tensor  # (products, rows)
    form_of: tuple[int, ...]
    forms: tuple[Mapping[str, Form], ...]  # by term
    rates: tuple[float, ...]
    terms: Tensor | None = None
    missing: Mapping[int, Reason] = field(default_factory=dict)
    rounding: tuple[float, float] = (0.0, 0.0)
    passes: float = 0.0
    motions: tuple[Motion | None, ...] = ()

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Records with the same key are added together."""
        return self.products, self.form_of, self.rows.dtype, tuple(self.missing)


class StepTerms:
    """Splits steps into terms.

    Plain SGD with one learning rate and one decay needs only squared gradients; everything else works on a copy of the weights before
    the step. `unchecked` says why the last step is no evidence.
    """

    def __init__(self, sums: LawSums, parameters: Sequence[Tensor], norms: NormTerms | None = None):
        self._sums, self._norms, self._parameters = sums, norms, parameters
        self.unchecked: Reason | None = None
        self._rule: UpdateRule = "measured"
        self._quick = self._without_gradients = self._closure = False
        self._copies: list[Tensor] | None = None
        self._grads: list[Tensor] | None = None
        self._terms: Tensor | None = None
        self._missing: dict[int, Reason] = {}
        self._numbers = Hyperparameters()
        self._decay_fraction = DecayShare()
        self._shared = False  # decay acts through a buffer in this step
        self._fresh: list[bool] = []  # by parameter, whether its momentum buffer begins with this step
        self._group_of_parameter: tuple[int, list[int]] | None = (
            None  # how many groups the optimizer has, and the group of each
        )

    def settings(self, optimizer: torch.optim.Optimizer) -> list[Settings]:
        """The optimizer's settings for every parameter, as plain numbers."""
        groups = optimizer.param_groups
        if self._group_of_parameter is None or self._group_of_parameter[0] != len(groups):
            of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
            missing = [i for i, p in enumerate(self._parameters) if id(p) not in of]
            if missing:
                raise InputError(
                    f"conservation: {self._sums.paths[missing[0]]} left the optimizer: start a new ledger for it"
                )
            self._group_of_parameter = len(groups), [of[id(p)] for p in self._parameters]
        result = {i: self._numbers.plain(groups[i]) for i in dict.fromkeys(self._group_of_parameter[1])}
        return [result[i] for i in self._group_of_parameter[1]]

    def before(self, rule: UpdateRule, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Reads the settings before a step, and copies the weights if the rule needs them."""
        self._shared = False
        settings = self.settings(optimizer)
        different = {id(group): group for group in settings}.values()
        nesterov = any(group.get("nesterov") for group in different)
        self.unchecked = _unchecked(rule, optimizer, closure, nesterov)
        if len({bool(group.get("maximize")) for group in different}) > 1:
            self.unchecked = Reason("optimizer", "param groups differ in maximize")
        self._rule = rule = "measured" if self.unchecked is not None else rule
        # Then the gradients that the step follows cannot be read.
        self._without_gradients = self.unchecked is not None and self.unchecked.key in ("closure", "scaler")
        self._closure = closure
        if self._norms is not None:
            self._norms.expect(closure)
            if not closure:
                self._take_terms(self._norms)
        self._quick = (
            rule == "sgd"
            and not closure
            and not any(group["momentum"] for group in different)
            and len({(group["lr"], group["weight_decay"]) for group in different}) == 1
            and all(p.grad is not None and not p.grad.is_sparse for p in self._parameters)
        )
        if self._quick:
            return
        weights = [p.detach() for p in self._parameters]
        if self._copies is None:
            self._copies = [torch.empty_like(w) for w in weights]
        torch._foreach_copy_(self._copies, weights)
        states = [optimizer.state.get(p, {}) for p in self._parameters]
        self._fresh = [state.get("momentum_buffer") is None for state in states]
        self._shared = rule in ("sgd", "adam") and self._decay_fraction.before(states, settings, weights)
        # Some implementations add Nesterov's momentum to the gradient in place.
        if not self._without_gradients and (rule == "measured" or nesterov):
            self._grads = [_grad(p).clone() for p in self._parameters]

    def _take_terms(self, norms: NormTerms) -> None:
        self._terms, self._missing = norms.terms(), norms.missing()
        norms.end()

    def after(self, step: int, optimizer: torch.optim.Optimizer) -> StepRecord:
        """The record of the step just made."""
        settings = self.settings(optimizer)
        if self._norms is not None and self._closure:
            self._take_terms(self._norms)
        if self._rule == "measured":
            self._numbers.forget_steps()
        columns: dict[str, Sequence[Tensor]] = {"a": [p.detach() for p in self._parameters]}
        products, derive = ["aa"], None
        if not self._without_gradients:
            columns["g"] = self._gradients(settings)
            products.append("gg")
        trained = [True] * len(settings) if self._quick else [p.grad is not None for p in self._parameters]
        correction, exact = [1.0] * len(settings), 1.0
        if not self._quick:
            assert self._copies is not None
            columns["w"] = self._copies
            states = [optimizer.state.get(p, {}) if t else {} for p, t in zip(self._parameters, trained)]
            products += ["ww"] if self._without_gradients else ["wg"]
            if self._rule == "measured":
                products += [] if self._without_gradients else ["ww"]
            elif self._rule == "sgd":
                columns["u"] = direction_of_sgd(states, settings, self._copies, columns["g"])
                products += ["wu", "uu"]
            else:
                counts = [self._numbers.steps(i, state) if state else 1.0 for i, state in enumerate(states)]
                if self._rule == "adam":
                    moments = moments_of_adam(states, settings, self._copies, counts)
                    correction, derive = moments.correction, _scale(moments, columns)
                    exact = min([1.0, *moments.correction, *(root * root for root in moments.root)])
                    products += ["wu", "uu", "ws", "ss"]
                else:
                    result = quotients(states, settings, self._copies, columns["g"], counts)
                    columns["s"], correction = result.scaled, result.correction
                    products += ["ws", "ss"]
                    if result.momentum is not None:
                        columns["u"] = result.momentum
                        products += ["wu", "uu"]
            if self._shared:
                columns["d"] = self._decay_fraction.directions(self._copies, settings, trained, correction)
                products += ["wd", "gd", "dd"]
        alike: dict[_Key, int] = {}
        keys = map(self._key, settings, trained, correction)
        form_of = tuple([alike.setdefault(key, len(alike)) for key in keys])
        rows = self._sums.rows(columns, products, derive)
        forms = tuple([self._forms(key, products) for key in alike])
        if self._terms is not None and settings[0].get("maximize"):
            self._terms = -self._terms
        return StepRecord(
            step, tuple(products), rows, form_of, forms, tuple([key[0] for key in alike]),
            self._terms, self._missing, _rounding(settings, exact),
            motions=self._motions(settings, form_of, len(alike)),
        )  # fmt: skip

    def _motions(self, settings: Sequence[Settings], form_of: Sequence[int], count: int) -> tuple[Motion | None, ...]:
        """The settings of SGD by form; None where they differ, for Nesterov's momentum and for other optimizers."""
        result: list[Motion | None] = [None] * count
        if self._rule != "sgd" or any(setting["nesterov"] for setting in settings):
            return tuple(result)
        several: list[set[Motion]] = [set() for _ in result]
        for i, (setting, form) in enumerate(zip(settings, form_of)):
            fresh = not self._quick and self._fresh[i]
            rate, decay, momentum, dampening = (
                float(setting[name]) for name in ("lr", "weight_decay", "momentum", "dampening")
            )
            several[form].add(Motion(rate, decay, momentum, dampening, fresh))
        return tuple(next(iter(motions)) if len(motions) == 1 else None for motions in several)

    def _gradients(self, settings: Sequence[Settings]) -> list[Tensor]:
        """The direction that the optimizer descends along: of an objective that it maximizes, minus the gradient."""
        grads = self._grads if self._grads is not None else [_grad(p) for p in self._parameters]
        self._grads = None
        if self._quick or not any(setting.get("maximize") for setting in settings):
            return grads  # the quick way needs their squares alone
        return [-g if setting.get("maximize") else g for g, setting in zip(grads, settings)]

    def _key(self, setting: Settings, trained: bool, correction: float) -> _Key:
        rate = setting.get("lr", 0.0) if trained else 0.0
        if self._rule == "measured":
            return rate, 0.0, 0.0, 1.0
        decay = setting["weight_decay"]
        # Adam's decoupled decay acts beside the moments, coupled decay inside them.
        return rate, decay, decay if setting.get("decoupled_weight_decay") else 0.0, correction

    def _forms(self, key: _Key, products: Sequence[str]) -> dict[str, Form]:
        """Factors of the products, by term; `rates` and `eps` follow from w·g alone."""
        rate, decay, shrink, correction = key
        if self._without_gradients:
            return {"update": {"aa": 1.0, "ww": -1.0}}
        step = plain(rate)
        forms = {"step": {"gg": step["gg"]}}
        if self._rule == "measured":
            return forms | {"update": less({"aa": 1.0, "ww": -1.0}, step)}
        forms["decay"] = decayed_by(rate, correction) if self._shared else decayed(rate, decay)
        if self._quick:
            return forms
        if self._rule in ("rmsprop", "adagrad"):
            scaled = moved(rate, 0.0, correction, "s")
            forms["rescaling"] = less(scaled, step, forms["decay"])
            return forms | ({"momentum": less(moved(rate, 0.0, correction, "u"), scaled)} if "uu" in products else {})
        direction = moved(rate, shrink, correction, "u")
        forms["momentum"] = less(direction, step, forms["decay"])
        if self._rule == "adam":
            forms["rescaling"] = less(moved(rate, shrink, correction, "s"), direction)
        return forms

    def state_dict(self) -> dict[str, Tensor]:
        """The contribution of decay to the momentum buffers, by parameter; empty where there is none."""
        return {path: v.clone() for path, v in zip(self._sums.paths, self._decay_fraction.buffers or [])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state from a checkpoint."""
        pairs = zip(self._sums.paths, self._parameters)
        self._decay_fraction.buffers = [state[path].to(p).clone() for path, p in pairs] if state else None


def _unchecked(rule: UpdateRule, optimizer: torch.optim.Optimizer, closure: bool, nesterov: bool) -> Reason | None:
    """Why the update of the step to come cannot be predicted, or None.

    Optimizers with a formula evaluate a closure once, at the weights before the step, and leave its gradients where they are: all but
    Nesterov's momentum, which may be added to them.
    """
    name = type(optimizer).__name__
    if closure and (rule == "measured" or nesterov):
        return Reason("closure", f"{name}.step(closure) makes its gradients inside the step, where they cannot be read")
    if rule == "measured":
        return Reason("optimizer", f"no formula predicts the update of {name} from the gradient")
    if getattr(optimizer, "grad_scale", None) is not None:
        return Reason("scaler", f"a fused {name} unscales its gradients inside the step (GradScaler)")
    return None


def _rounding(settings: Sequence[Settings], exact: float) -> tuple[float, float]:
    """A bound on the relative error of what the optimizer computes of its settings where these are tensors.

    Some operations in their precision, and 1 − βᵗ, which is at least `exact`; and of 1 − ηλ, by which decoupled decay multiplies weights.
    """
    coarse = max(setting["coarse"] for setting in settings)
    counted = max(setting["counted"] for setting in settings)
    decoupled = any(setting.get("decoupled_weight_decay") and setting["weight_decay"] for setting in settings)
    return 8 * coarse + 8 * counted / exact, 2 * max(coarse, counted) if decoupled else 0.0


def _grad(p: Tensor) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    grad = p.grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


def _scale(moments: OptimizerMoments, columns: dict[str, Sequence[Tensor]]) -> Derive | None:
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
