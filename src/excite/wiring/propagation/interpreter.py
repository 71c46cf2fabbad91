"""The one interpreter of exported graphs: it propagates values by one column of the operator table."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from excite.errors import ModelError
from excite.wiring.export import Exported
from excite.wiring.operators.row import OPERATORS, OVERLOADS, OperatorRow
from excite.wiring.propagation.aliasing import Aliases
from excite.wiring.propagation.schema import bind, is_inplace, module_of, name_of

Column = Literal["channels", "lipschitz", "paths"]


class Interpreter:
    """Visits the nodes of a graph in order of execution and applies the rules of `column` to what depends on its inputs.

    Subclasses say what parameters and inputs are (`parameter`, `input`), of which types the propagated values are
    (`followed`), and what happens at an operator without a rule (`missing`). Everything else is computed as it is.
    """

    column: ClassVar[Column]
    refusal: ClassVar[str] = ""  # opens the message of a refusal; the operator's name follows
    followed: ClassVar[tuple[type, ...]]

    def __init__(self, context: Any):
        self.context = context

    def parameter(self, node: torch.fx.Node, path: str) -> Any:
        """The value of a parameter of the model."""
        raise NotImplementedError

    def input(self, node: torch.fx.Node) -> Any:
        """The value of an input of the model."""
        raise NotImplementedError

    def constant(self, value: Tensor) -> Any:
        """The value of a buffer or of another constant tensor."""
        return value.cpu()

    def compute(self, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that depends on no followed value."""
        if isinstance(node.target, HigherOrderOperator):  # a graph inside the graph, as for torch.no_grad
            return self.missing(node, [])
        if is_inplace(node.target):  # it would write into the model
            args = (args[0].clone(), *args[1:])
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        return value.cpu() if isinstance(value, Tensor) else value

    def apply(self, rule: Callable[..., Any], node: torch.fx.Node, arguments: SimpleNamespace) -> Any:
        """The result of a call by the rule of its operator."""
        return rule(self.context, node, arguments)

    def missing(self, node: torch.fx.Node, values: list[Any]) -> Any:
        """The result of a call of an operator without a rule in this column."""
        raise refused(self.refusal, node, refused_name(node.target), self.column)

    def overwritten(self, node: torch.fx.Node, values: list[Any]) -> None:
        """Called where `node` writes into memory that is read later under another name; `values` are those of all names."""
        raise refused(self.refusal, node, f"{name_of(node.target)}_ on a tensor that is read elsewhere")

    def rule(self, node: torch.fx.Node, row: OperatorRow | None) -> Callable[..., Any] | None:
        """The rule for a call, by the operator's row of the table; None if it has none."""
        return None if row is None else getattr(row, self.column)

    def run(self, exported: Exported) -> Any:
        """The values of the graph's outputs, nested as the model returns them."""
        values: dict[torch.fx.Node, Any] = {}
        aliases = Aliases()
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._placeholder(exported, node)
            elif node.op == "call_function":
                values[node] = self._call(node, values)
                shared = aliases.overwritten(node)
                if shared:
                    self.overwritten(node, [values[node], *(values.get(other) for other in shared)])
            elif node.op == "output":
                return _read(node.args, values)
            else:
                values[node] = None
        raise ModelError("the graph of the model has no output")

    def _placeholder(self, exported: Exported, node: torch.fx.Node) -> Any:
        if node.name in exported.parameters:
            return self.parameter(node, exported.parameters[node.name])
        if node.name in exported.constants:
            return self.constant(exported.constants[node.name])
        return self.input(node)

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        args, kwargs = _read(tuple(node.args), values), _read(dict(node.kwargs), values)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if not node.users and not is_inplace(node.target):
            return None  # it is not read: an assertion, or a dead branch
        followed = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, self.followed)]
        if not followed:
            return self.compute(node, args, kwargs)
        row = lookup(node.target)
        rule = self.rule(node, row)
        if rule is None:
            return self.missing(node, followed)
        arguments = bind(node.target, args, kwargs)
        arguments.row = row
        return self.apply(rule, node, arguments)


def lookup(target: Any) -> OperatorRow | None:
    """The row of an operator; None if it has none, for other overloads, and for operators that are not PyTorch's own."""
    name = str(getattr(getattr(target, "_schema", None), "name", ""))
    known = name.startswith("aten::") and target._overloadname in OVERLOADS
    return OPERATORS.get(name_of(target)) if known else None


def refused_name(target: Any) -> str:
    """The name of an operator without a row, with the overload where other overloads have one."""
    name, overload = name_of(target), getattr(target, "_overloadname", "default")
    return f"{name}.{overload}" if name in OPERATORS and overload not in OVERLOADS else name


def refused(refusal: str, node: torch.fx.Node, description: str, column: str = "") -> ModelError:
    """The error of an analysis that cannot continue: the unknown operator, and in which module."""
    module = module_of(node)
    location = f" (in {module})" if module else ""
    hint = f": the operator table (excite.wiring.operators) has no column {column!r} for it" if column else ""
    return ModelError(f"{refusal} {description}{location}{hint}")


def leaves(value: Any) -> list[Any]:
    """Everything in nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def _read(argument: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if isinstance(argument, torch.fx.Node):
        return values[argument]
    if isinstance(argument, tuple):
        return tuple(_read(item, values) for item in argument)
    if isinstance(argument, list):
        return [_read(item, values) for item in argument]
    if isinstance(argument, dict):
        return {key: _read(item, values) for key, item in argument.items()}
    return argument
