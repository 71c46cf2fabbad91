"""Walk through a graph and collect, for every tensor, how far it can move when the input moves by one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from excite.errors import ModelError
from excite.wiring.channels.signals import module_of, shapes_of
from excite.wiring.export import Exported
from excite.wiring.propagation.aliasing import Aliases
from excite.wiring.propagation.schema import bind, is_inplace, name_of


@dataclass(frozen=True)
class Reach:
    """How far a tensor can move when the model's input moves by one.

    In the 2-norm, by `factor` as a whole. In the infinity norm each element on its own, by `spread`; `factor` is then
    the largest of these. Following the elements is what makes the bound for the infinity norm much smaller than the
    product of the layers' norms, and it is just as safe: |Σ w δ| ≤ Σ |w| |δ|.
    """

    factor: float
    shape: tuple[int, ...]
    spread: Tensor | None = None


Kind = Literal["inf", "2"]
Rule = Callable[["Walk", torch.fx.Node, SimpleNamespace], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


class Walk:
    """The norm, and the terms found so far."""

    def __init__(self, norm: Kind):
        self.norm: Kind = norm
        self.terms: list[tuple[str, float]] = []
        self.branches = False

    def step(
        self, node: torch.fx.Node, x: Reach, what: str, factor: Callable[[], float], spread: Callable[[Tensor], Tensor]
    ) -> Reach:
        """What `node` makes of x: `factor` is the constant of the map in the 2-norm, `spread` what it does to |δ|."""
        if x.spread is None:
            growth = factor()
            result = Reach(x.factor * growth, first_shape(node))
        else:
            with torch.no_grad():
                result = whole(spread(x.spread))
            growth = result.factor / x.factor if x.factor else 1.0
        if abs(growth - 1.0) > 1e-12:
            self.terms.append((what, growth))
        return result

    def meet(self, node: torch.fx.Node, what: str, factor: Callable[[], float], spread: Callable[[], Tensor]) -> Reach:
        """Several branches in one tensor."""
        result = Reach(factor(), first_shape(node)) if self.norm == "2" else whole(spread())
        self.terms.append((what, result.factor))
        self.branches = True
        return result


def whole(spread: Tensor) -> Reach:
    return Reach(float(spread.max()) if spread.numel() else 0.0, tuple(spread.shape), spread)


def first_shape(node: torch.fx.Node) -> tuple[int, ...]:
    shapes = shapes_of(node)
    return tuple(shapes[0] if isinstance(shapes, list) else shapes)


def unknown(node: torch.fx.Node, name: str) -> ModelError:
    where = module_of(node)
    return ModelError(f"no Lipschitz bound known for {name}" + (f" (in {where})" if where else ""))


def interpret(
    exported: Exported, parameters: dict[str, Tensor], norm: Kind
) -> tuple[Reach, tuple[tuple[str, float], ...], bool]:
    """How far the first output of the graph can move, the terms of that, and whether branches were added."""
    walk = Walk(norm)
    aliases = Aliases()
    values: dict[torch.fx.Node, Any] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            values[node] = _placeholder(exported, parameters, node, norm)
        elif node.op == "call_function":
            values[node] = _call(walk, node, values)
            if aliases.overwritten(node):
                raise unknown(node, f"{name_of(node.target)}_ on a tensor that is read elsewhere")
        elif node.op == "output":
            result = _read(node.args, values)
            while isinstance(result, tuple | list):
                result = result[0]
            if not isinstance(result, Reach):  # it does not depend on the input
                result = Reach(0.0, tuple(getattr(result, "shape", ())))
            return result, tuple(walk.terms), walk.branches
        else:
            values[node] = None
    raise ModelError("no Lipschitz bound known: the graph of the model has no output")


def _placeholder(exported: Exported, parameters: dict[str, Tensor], node: torch.fx.Node, norm: Kind) -> Any:
    if node.name in parameters:
        return parameters[node.name].detach().cpu()
    if node.name in exported.constants:
        return exported.constants[node.name].cpu()
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    factor, shape = float(value.is_floating_point()), tuple(value.shape)
    return Reach(factor, shape, torch.full(shape, factor, dtype=torch.float64) if norm == "inf" else None)


def _read(argument: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if isinstance(argument, torch.fx.Node):
        return values[argument]
    if isinstance(argument, tuple | list):
        return type(argument)([_read(part, values) for part in argument])
    if isinstance(argument, dict):
        return {key: _read(part, values) for key, part in argument.items()}
    return argument


def _moving(argument: Any) -> bool:
    if isinstance(argument, tuple | list):
        return any(map(_moving, argument))
    if isinstance(argument, dict):
        return any(map(_moving, argument.values()))
    return isinstance(argument, Reach)


def _call(walk: Walk, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    args = tuple(_read(list(node.args), values))
    kwargs = _read(dict(node.kwargs), values)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if not node.users and not is_inplace(node.target):
        return None
    name = name_of(node.target)
    if not _moving((args, kwargs)):
        if is_inplace(node.target):  # it would write into the model
            args = (args[0].clone(), *args[1:])
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        return value.cpu() if isinstance(value, Tensor) else value
    if name not in RULES or not hasattr(node.target, "_schema"):
        raise unknown(node, name)
    return RULES[name](walk, node, bind(node.target, args, kwargs))
