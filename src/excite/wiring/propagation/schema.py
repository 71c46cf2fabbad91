"""Names, arguments, modules and shapes of the calls in a graph."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def name_of(target: Any) -> str:
    """The name of an operator without namespace, overload and the underscore of an in-place variant."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return getattr(target, "__name__", str(target))
    name = str(schema.name).split("::")[-1]
    return name[:-1] if is_inplace(target) else name


def is_inplace(target: Any) -> bool:
    """Whether an operator writes into its first argument, as `relu_` does."""
    name = str(getattr(getattr(target, "_schema", None), "name", ""))
    return name.endswith("_") and not name.endswith("__")


def bind(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """The arguments of an ATen call by the names of its schema, defaults filled in.

    The namespace also holds `op` (the operator's name), `target`, `args` and `kwargs`, the call as it was made; the
    interpreter adds `row`, the operator's row of the table.
    """
    bound: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    # Last, because losses have an argument `target`, too.
    return SimpleNamespace(**(bound | {"op": name_of(target), "target": target, "args": args, "kwargs": kwargs}))


def module_of(node: torch.fx.Node) -> str:
    """The path of the module that makes a call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("inner.").removeprefix("inner")


_ACTIVATIONS = "gelu|silu|swish|swiglu|mish|softplus|sigmoid|tanh|elu|relu"
_FUNCTION = re.compile(rf"(\w*(?:{_ACTIVATIONS})\w*)\(", re.IGNORECASE)


def written_name(node: torch.fx.Node, op: str) -> str:
    """The name of an activation that is written out, as NewGELU for its pow and tanh; that of the operator for any other call."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module_type = str(stack[-1][1]) if stack else ""
    name = module_type.rpartition(".")[2].removesuffix("Activation")
    if not re.search(_ACTIVATIONS, name, re.IGNORECASE):
        line = str(node.meta.get("stack_trace") or "").rpartition("\n    ")[2]  # the call in the module's own code
        names = set(_FUNCTION.findall(line))
        name = names.pop() if len(names) == 1 else ""
    return op if not name or op.replace("_", "") in name.lower() else name


def shapes_of(node: torch.fx.Node) -> Any:
    """The shape of what a node returns; nested lists for several tensors, None for anything else."""

    def shape(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(int(size) for size in value.shape)
        if isinstance(value, tuple | list):
            return [shape(item) for item in value]
        return None

    return shape(node.meta.get("val"))


def first_shape(node: torch.fx.Node) -> tuple[int, ...]:
    """The shape of the first tensor that a node returns."""
    shapes = shapes_of(node)
    return tuple(shapes[0] if isinstance(shapes, list) else shapes)
