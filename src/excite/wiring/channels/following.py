"""Follow the channels of a model through its graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.intercept.affine import clean_path
from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import ChannelContext, ChannelSignal
from excite.wiring.channels.slots import ParameterView, Use
from excite.wiring.export import Exported
from excite.wiring.operators.normalization import written_norm
from excite.wiring.operators.row import OperatorRow
from excite.wiring.propagation.interpreter import Interpreter, leaves, lookup, refused_name
from excite.wiring.propagation.schema import is_inplace, name_of, shapes_of
from excite.wiring.propagation.written_norms import WrittenNorms, find_written_norms


class ChannelInterpreter(Interpreter):
    """Propagates channel labels. Operators without a rule pin what enters them, so that no law is claimed."""

    column = "channels"
    followed = (ChannelSignal, ParameterView)
    context: ChannelContext
    written = WrittenNorms()

    def run(self, exported: Exported) -> Any:
        """Follows the graph; normalizations that are written out count as what they compute."""
        self.written = find_written_norms(exported.graph.nodes)
        return super().run(exported)

    def rule(self, node: torch.fx.Node, row: OperatorRow | None) -> Callable[..., Any] | None:
        """The operator's rule, unless the call is part of a normalization that is written out."""
        if node in self.written.norms:
            return partial(written_norm, self.written.norms[node])
        if node in self.written.inner:
            return _statistic
        return super().rule(node, row)

    def parameter(self, node: torch.fx.Node, path: str) -> ParameterView:
        """Returns a parameter by name and shape."""
        return ParameterView(path, self.context.shapes[path])

    def constant(self, value: Tensor) -> Any:
        """Returns a constant as it is; one on the meta device, whose values are not known, by its shape."""
        return self.context.constant(tuple(value.shape)) if value.device.type == "meta" else value

    def input(self, node: torch.fx.Node) -> Any:
        """Returns the labels of the model's input, which does not scale."""
        shape = shapes_of(node)
        return self.context.constant(shape, "the model's input") if isinstance(shape, tuple) else node.meta.get("val")

    def compute(self, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Numbers that depend on nothing: computed, so that rules may read them (indices), unless they are random."""
        shape = shapes_of(node)
        tags = getattr(node.target, "tags", ())
        known = hasattr(node.target, "_schema") and not is_inplace(node.target)
        if known and torch.Tag.nondeterministic_seeded not in tags and isinstance(shape, tuple):
            kwargs = {key: _with_memory(value) for key, value in kwargs.items()}
            try:
                with torch.no_grad():
                    return node.target(*map(_with_memory, args), **kwargs)  # type: ignore[operator]
            except (RuntimeError, TypeError, ValueError):
                pass
        if isinstance(shape, list):
            return tuple(self.context.constant(size) for size in shape)
        return self.context.constant(shape) if shape is not None else None

    def apply(self, rule: Callable[..., Any], node: torch.fx.Node, arguments: SimpleNamespace) -> Any:
        """Applies an operator's rule; channels that enter an overload it was not written for are pinned."""
        before = len(self.context.uses)
        try:
            result = rule(self.context, node, arguments)
            if isinstance(result, ChannelSignal) and len(self.context.uses) > before:
                self.context.made[node] = self.context.uses[before], result.labels
            return result
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            # An overload that the rule was not written for. What enters it is pinned, so that no law is claimed.
            return self.missing(node, followed_in((arguments.args, arguments.kwargs)))

    def missing(self, node: torch.fx.Node, values: list[Any]) -> Any:
        """Pins the channels that enter an operator without a rule."""
        row = lookup(node.target)
        listed = row is not None and (row.channels is not None or row.conservation == "none")
        return self.context.unknown(node, values, refused_name(node.target), listed=listed)

    def overwritten(self, node: torch.fx.Node, values: list[Any]) -> None:
        """Pins the channels of a tensor that is written in place while it is read elsewhere."""
        reason = Break(f"{name_of(node.target)}_ writes into a tensor that is read elsewhere")
        for value in tensors_in(values):
            self.context.classes.pin(self.context.signal(value).labels, reason)


def _with_memory(argument: Any) -> Any:
    """The CPU in place of the meta device: a graph on it has numbers that depend on no input, such as positions, nonetheless."""
    return torch.device("cpu") if isinstance(argument, torch.device) and argument.type == "meta" else argument


def _statistic(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """Inside a normalization that is written out: only x − mean x continues as x."""
    value = a.args[0]
    same = isinstance(value, ChannelSignal) and value.shape == shapes_of(node)
    return value if same else ctx.constant(shapes_of(node))


def follow(model: nn.Module, exported: Exported) -> ChannelContext:
    """All uses of parameters, with the labels of what they read and make, and what is known about the labels."""
    shapes = {clean_path(path): tuple(parameter.shape) for path, parameter in model.named_parameters()}
    ctx = ChannelContext(shapes, model.training)
    for value in tensors_in(ChannelInterpreter(ctx).run(exported)):
        ctx.classes.exclude(ctx.signal(value).labels, Break("they reach the model's output"))
    _pin_frozen(ctx, model)
    _tie(ctx)
    for first, second, result in ctx.bilinear:
        if not ctx.classes.all_fixed(result):  # only for a fixed product are the factors inverse matrices of each other
            ctx.classes.not_mixable(first)
            ctx.classes.not_mixable(second)
    ctx.relations.solve()
    return ctx


def followed_in(value: Any) -> list[Any]:
    """The labeled activations and the parameters in nested arguments."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, ChannelSignal | ParameterView)]


def tensors_in(value: Any) -> list[Any]:
    """These, and constant tensors."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, ChannelSignal | ParameterView | Tensor)]


def _pin_frozen(ctx: ChannelContext, model: nn.Module) -> None:
    """A law is about training: a parameter that does not train keeps its scale (unless none of them trains)."""
    trains = {clean_path(path): parameter.requires_grad for path, parameter in model.named_parameters()}
    if not any(trains.values()):
        return
    for use in ctx.uses:
        if not trains[use.slot.source.path]:
            _pin_use(ctx, use, f"{use.slot.source.path} does not train")


def _pin_use(ctx: ChannelContext, use: Use, cause: str) -> None:
    for labels in (use.out, use.inp):
        if labels is not None:
            ctx.classes.pin(labels, Break(cause))


def _tie(ctx: ChannelContext) -> None:
    """Every entry of a parameter has one factor: factor of what it makes over factor of what it reads.

    A parameter that is used several times has to have the same one everywhere. Uses in the same way tie their channels
    to each other; for uses in different ways (a matrix here, its transpose there) all of them are pinned.
    """
    by_path: dict[str, list[Use]] = {}
    for use in ctx.uses:
        by_path.setdefault(use.slot.source.path, []).append(use)
    for path, uses in by_path.items():
        for i, use in enumerate(uses):
            for other in uses[:i]:
                if use.slot == other.slot:
                    cause = f"it shares {path} with a layer that reads {{}}"
                    for first, two in ((use.out, other.out), (use.inp, other.inp)):
                        if first is not None and two is not None:
                            ctx.classes.unite(first, two, cause)
                elif bool(torch.isin(use.slot.source.entries(), other.slot.source.entries()).any()):
                    _pin_use(ctx, use, f"{path} is used in several ways")
                    _pin_use(ctx, other, f"{path} is used in several ways")
