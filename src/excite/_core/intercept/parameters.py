"""Roles of all parameters of a model in a forward pass, so that none is left out silently."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from excite._core.intercept.names import Sources, clean_path
from excite._core.warn import warn_user

_ADDED = {"add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "addcmul", "addcdiv"}
_SCALED = {"mul", "rmul", "imul", "multiply", "div", "truediv", "rtruediv", "itruediv", "divide", "true_divide"}
_NORMALIZATIONS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
_LOOKUPS = {"embedding", "embedding_bag", "getitem", "index_select", "gather", "take", "take_along_dim", "index"}
_INSERTED = {
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "where", "masked_fill", "masked_scatter", "setitem",
    "copy", "scatter", "index_put", "index_copy", "index_fill", "select_scatter", "slice_scatter",
}  # fmt: skip
_ROLES = {
    **dict.fromkeys(_ADDED, "bias"),
    **dict.fromkeys(_SCALED, "scaling"),
    **dict.fromkeys(_NORMALIZATIONS, "normalization"),
    **dict.fromkeys(_LOOKUPS, "embedding"),
    **dict.fromkeys(_INSERTED, "learned signal"),
    "prelu": "slope of an activation",
}
_PER_SAMPLE = "part of a matrix of each sample's own that another signal is multiplied by"
TRANSFORMED = "used inside torch.vmap or torch.func"
ABSENT = "not used with data in the forward pass"


class Roles:
    """Roles of parameters, by path: filled by a pass of `AffineMode`."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.unknown: dict[str, str] = {}  # path -> the function that takes it
        self._multiplied: set[str] = set()

    def layer(self, name: str, weight: Iterable[str], bias: Iterable[str], input: Iterable[str]) -> None:
        """An affine call."""
        for path in weight:
            self.known[path] = f"weight of {name.split('#')[0]}"
        for path in bias:
            self.known.setdefault(path, f"bias of {name.split('#')[0]}")
        for path in input:
            self.known.setdefault(path, "learned signal")

    def multiplied(self, sources: Sources) -> None:
        """A product of the data with a sum of each sample's own matrix and of one that is computed from these parameters."""
        self._multiplied.update(sources)

    def transformed(self, sources: Sources) -> None:
        """A call inside `torch.vmap` or `torch.func`."""
        for path in sources:
            self.unknown.setdefault(path, TRANSFORMED)

    @property
    def inside_transforms(self) -> bool:
        return TRANSFORMED in self.unknown.values()

    def meets(self, function: str, sources: Sources, signals: Sequence[Tensor], result: Any) -> None:
        """Another function of the data and of something that is computed from these parameters."""
        function = function.strip("_")
        role = _ROLES.get(function)
        if role == "scaling" and isinstance(result, Tensor) and all(s.shape != result.shape for s in signals):
            role = None  # larger than the signal: not one factor for each of its entries
        for path in sources:
            if role is not None:
                self.known.setdefault(path, role)
            else:
                self.unknown.setdefault(path, f"used by {function}")

    def of(self, model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
        """The roles of the parameters of `model`, and for each that has none, the reason."""
        paths = [clean_path(path) for path, _ in model.named_parameters()]
        for path in self._multiplied:
            if self.known.get(path) in ("bias", "scaling"):
                del self.known[path]
                self.unknown[path] = _PER_SAMPLE
        roles = {path: self.known[path] for path in paths if path in self.known}
        return roles, {path: self.unknown.get(path, ABSENT) for path in paths if path not in roles}


def sentence(missing: Mapping[str, str], max_listed: int | None = None) -> str:
    """One line that names the parameters without a role."""
    by_reason: dict[str, list[str]] = {}
    for path in list(missing)[:max_listed]:
        by_reason.setdefault(missing[path], []).append(path)
    text = "; ".join(f"{', '.join(paths)} ({reason})" for reason, paths in by_reason.items())
    more = len(missing) - sum(map(len, by_reason.values()))
    tail = f"; and {more} more, see excite.trace(model, example).notes" if more else ""
    return (
        "parameters that are part of no affine layer, normalization, embedding, scaling or bias, so that their inputs are "
        f"not perturbed: {text}{tail}. Affine layers are recognised if written as modules, F.linear, @ or einsum of one "
        "tensor that depends on the data with weights"
    )


_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def account(model: nn.Module) -> Roles | None:
    """Where a pass can note the roles of parameters; None if `report` has been called for this model."""
    return None if model in _warned else Roles()


def report(model: nn.Module, roles: Roles | None) -> None:
    """Warn, once per model, of the parameters whose role is not known."""
    if roles is None:
        return
    _warned.add(model)
    missing = roles.of(model)[1]
    if missing:
        warn_user(sentence(missing, max_listed=8))
