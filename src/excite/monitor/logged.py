"""Values that the training itself logs with `watch.log`: checked here, then buffered and written like those of probes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from excite._core.checks import shown
from excite.errors import InputError
from excite.probes import Probe
from excite.runs.checks import is_name

_ALERT = "alert"  # first part of the names of alerts


class _Logged(Probe):
    """Owner of logged values in the buffer; it measures nothing."""

    name, reduction, runs_model = "", "first", False


LOGGED = _Logged()  # by watch.log
LOGGED_BY_FRAMEWORK = _Logged()  # the framework's own loggers have these already


@cache
def _built_in() -> frozenset[str]:
    from excite.probes import built_in_probes

    return frozenset(probe.name for probe in built_in_probes())


def check_logged(values: object, named: Mapping[str, Any], probes: Collection[Probe]) -> dict[str, Any]:
    """Names and values of one call of `watch.log`, all of them checked before any is recorded.

    Args:
        values: A dict, or None.
        named: The keyword arguments.
        probes: The attached probes, whose names are not free.

    Returns:
        Numbers and one-element tensors by name. Tensors stay on their device.

    Raises:
        InputError: If a name or a value cannot be recorded.
    """
    if values is not None and not isinstance(values, Mapping):
        raise InputError(f"watch.log: expected names and values, as in watch.log(lr=0.1); got {shown(values)}")
    every = {**(values or {}), **named}
    for name in every:
        if not is_name(name):
            raise InputError(f"watch.log: expected names such as 'lr' or 'val/accuracy'; got {shown(name)}")
        if is_owned(name, probes):
            source = "the alerts" if (first := name.split("/", 1)[0]) == _ALERT else f"the probe {first!r}"
            raise InputError(f"watch.log: {name!r} belongs to {source}: choose another name, such as 'train/{name}'")
    return {name: _number(name, value) for name, value in every.items()}


def is_owned(name: str, probes: Collection[Probe]) -> bool:
    """Whether a name belongs to a probe, built in or attached, or to the alerts."""
    first = name.split("/", 1)[0]
    return first == _ALERT or first in _built_in() or any(probe.name == first for probe in probes)


def is_loggable(value: object) -> bool:
    """Whether `watch.log` records a value: one number, also in a tensor or an array."""
    try:
        _number("", value)
    except InputError:
        return False
    return True


def _number(name: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor):
        readable = value.layout is torch.strided and not value.is_nested and value.device.type != "meta"
        if readable and value.numel() == 1 and not value.is_complex():
            return value
    elif isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if isinstance(value, int | float):  # True and False are 1 and 0
        try:
            return float(value)
        except OverflowError:
            raise InputError(
                f"watch.log: {name!r}: expected a number that fits into float64; got {shown(value)}"
            ) from None
    several = isinstance(value, Tensor | np.ndarray | list | tuple)
    advice = ": log a summary, such as its mean" if several else ""
    raise InputError(f"watch.log: {name!r}: expected a number or a tensor with one element; got {shown(value)}{advice}")
