"""Follow the channels of a model through its graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.intercept.affine import clean_path
from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import Bench, Signal, shapes_of
from excite.wiring.channels.slots import Held, Use
from excite.wiring.export import Exported
from excite.wiring.operators import arithmetic, convolution, linear, movement, normalization, pooling  # noqa: F401
from excite.wiring.propagation.aliasing import Aliases
from excite.wiring.propagation.schema import RULES, bind, is_inplace, name_of


def follow(model: nn.Module, exported: Exported) -> Bench:
    """All uses of parameters, with the labels of what they read and make, and what is known about the labels."""
    shapes = {clean_path(path): tuple(parameter.shape) for path, parameter in model.named_parameters()}
    bench = Bench(shapes, model.training)
    values: dict[torch.fx.Node, Any] = {}
    aliases = Aliases()
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(bench, exported, node)
        elif node.op == "call_function":
            values[node] = _call(bench, node, values)
            shared = aliases.overwritten(node)
            if shared:
                _pin_overwritten(bench, node, shared, values)
        elif node.op == "output":
            for value in _tensors(_read(node.args, values)):
                bench.classes.set_aside(bench.signal(value).labels, Break("they reach the model's output"))
        else:
            values[node] = None
    _pin_frozen(bench, model)
    _tie(bench)
    bench.relations.settle()
    return bench


def _placeholder(bench: Bench, exported: Exported, node: torch.fx.Node) -> Any:
    if node.name in exported.parameters:
        path = exported.parameters[node.name]
        return Held(path, bench.shapes[path])
    if node.name in exported.constants:
        return exported.constants[node.name]
    shape = shapes_of(node)
    return bench.constant(shape, "the model's input") if isinstance(shape, tuple) else node.meta.get("val")


def _read(argument: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if isinstance(argument, torch.fx.Node):
        return values[argument]
    if isinstance(argument, tuple | list):
        parts = [_read(part, values) for part in argument]
        return tuple(parts) if isinstance(argument, tuple) else parts
    if isinstance(argument, dict):
        return {key: _read(part, values) for key, part in argument.items()}
    return argument


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _tensors(part)]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return [value] if isinstance(value, Signal | Held | Tensor) else []


def _call(bench: Bench, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    args, kwargs = _read(node.args, values), _read(node.kwargs, values)
    if node.target is operator.getitem:
        return args[0][args[1]]
    tensors = _tensors((args, kwargs))
    moving = [value for value in tensors if isinstance(value, Signal | Held)]
    if not node.users and not is_inplace(node.target):
        return None  # nobody reads it: an assertion, or a dead branch
    if not moving:
        return _constant(bench, node, tensors, args, kwargs)
    name = name_of(node.target)
    if name in RULES and hasattr(node.target, "_schema"):
        try:
            return RULES[name](bench, node, bind(node.target, args, kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            # An overload that the rule was not written for. What enters it is pinned, so that no law is claimed.
            pass
    return bench.unknown(node, moving, name)


def _constant(bench: Bench, node: torch.fx.Node, tensors: list[Any], args: Any, kwargs: Any) -> Any:
    """Numbers that depend on nothing: computed, so that rules may read them (indices), unless they are random."""
    shape = shapes_of(node)
    tags = getattr(node.target, "tags", ())
    known = hasattr(node.target, "_schema") and not is_inplace(node.target)
    if known and torch.Tag.nondeterministic_seeded not in tags and isinstance(shape, tuple):
        try:
            with torch.no_grad():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError):
            pass
    if isinstance(shape, list):
        return tuple(bench.constant(one) for one in shape)
    return bench.constant(shape) if shape is not None else None


def _pin_overwritten(bench: Bench, node: torch.fx.Node, shared: list[torch.fx.Node], values: dict[Any, Any]) -> None:
    reason = Break(f"{name_of(node.target)}_ writes into a tensor that is read elsewhere")
    for value in _tensors([values[node], *(values.get(other) for other in shared)]):
        bench.classes.pin(bench.signal(value).labels, reason)


def _pin_frozen(bench: Bench, model: nn.Module) -> None:
    """A law is about training: a parameter that does not train keeps its scale (unless none of them trains)."""
    trains = {clean_path(path): parameter.requires_grad for path, parameter in model.named_parameters()}
    if not any(trains.values()):
        return
    for use in bench.uses:
        if not trains[use.slot.held.path]:
            _pin_use(bench, use, f"{use.slot.held.path} does not train")


def _pin_use(bench: Bench, use: Use, what: str) -> None:
    for labels in (use.out, use.inp):
        if labels is not None:
            bench.classes.pin(labels, Break(what))


def _tie(bench: Bench) -> None:
    """Every entry of a parameter has one factor: factor of what it makes over factor of what it reads.

    A parameter that is used several times has to have the same one everywhere. Uses in the same way tie their channels
    to each other; for uses in different ways (a matrix here, its transpose there) all of them are pinned.
    """
    by_path: dict[str, list[Use]] = {}
    for use in bench.uses:
        by_path.setdefault(use.slot.held.path, []).append(use)
    for path, uses in by_path.items():
        for i, use in enumerate(uses):
            for other in uses[:i]:
                if use.slot == other.slot:
                    what = f"it shares {path} with a layer that reads {{}}"
                    for one, two in ((use.out, other.out), (use.inp, other.inp)):
                        if one is not None and two is not None:
                            bench.classes.unite(one, two, what)
                elif bool(torch.isin(use.slot.held.entries(), other.slot.held.entries()).any()):
                    _pin_use(bench, use, f"{path} is used in several ways")
                    _pin_use(bench, other, f"{path} is used in several ways")
