"""The table of rules: what each operation of a graph does to labels, and how its arguments are read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from excite.wiring.channels.signals import Bench

Rule = Callable[[Bench, torch.fx.Node, SimpleNamespace], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operations by name, whatever their overload; `name` covers the in-place `name_` too."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def name_of(target: Any) -> str:
    """The name of an operation without namespace, overload and the underscore of an in-place variant."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", str(target))
    name = str(schema.name).split("::")[-1]
    return name[:-1] if is_inplace(target) else name


def is_inplace(target: Any) -> bool:
    name = str(getattr(getattr(target, "_schema", None), "name", ""))
    return name.endswith("_") and not name.endswith("__")


def bind(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """The arguments of an ATen call by the names of its schema, defaults filled in."""
    bound: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    own = {
        "op": name_of(target),
        "target": target,
        "args": args,
        "kwargs": kwargs,
    }  # losses have an argument `target`, too
    return SimpleNamespace(**(bound | own))
