"""The values that flow through a model's graph when its channels are followed instead of its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite._core.intercept.names import layer_name
from excite.wiring.channels.labels import Break, Classes, Relations
from excite.wiring.channels.slots import ParameterView, Slot, Use, entries_slot
from excite.wiring.propagation.schema import module_of, shapes_of, written_name


@dataclass(frozen=True)
class ChannelSignal:
    """An activation: the label of every element, and its fingerprint.

    The fingerprint is what the linear maps since the last affine layer make of one random pattern, the same for every
    channel. Channels with equal fingerprints went through the same linear map: only those may be mixed with each other
    (the "matrix" law). None where it does not matter: behind something that is not linear.
    """

    labels: Tensor
    prints: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the activation."""
        return tuple(self.labels.shape)

    def map(self, function: Callable[[Tensor], Tensor]) -> ChannelSignal:
        """The same rearrangement of labels and fingerprints."""
        return ChannelSignal(function(self.labels), None if self.prints is None else function(self.prints))


@dataclass(frozen=True)
class NormRead:
    """One call of a normalization.

    `labels` (rows, positions): of what is normalized together. Positions are channels of batch and instance normalization, groups of
    group normalization, heads where layer or RMS normalization takes each by itself, otherwise a single one.
    """

    module: str
    op: str
    labels: Tensor
    axis: int | None = (
        None  # of the input, counted from the end: that of the positions, where heads are normalized one by one
    )
    eps: float | None = None  # of a normalization that is written out as x / √(mean x² + ε)


class ChannelContext:
    """State shared by the rules: the classes of labels, the uses of parameters, names and random patterns."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], training: bool):
        self.classes = Classes()
        self.uses: list[Use] = []
        self.made: dict[torch.fx.Node, tuple[Use, Tensor]] = {}  # by call: its first use, and the labels of its result
        self.relations = Relations(self.classes)
        self.more_prints: list[tuple[Tensor, Tensor]] = []  # further fingerprints: labels, projections (channels, 2)
        self.norm_reads: list[NormRead] = []
        self.bilinear: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # labels of both factors and of a product of activations
        self.shapes = shapes
        self.training = training
        self._calls: dict[str, int] = {}
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        """Random numbers that are the same in every trace."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def layer(self, value: Any, node: torch.fx.Node) -> str:
        """The name of an affine call: the weight's path, counted like `Names` counts them."""
        if isinstance(value, ParameterView):
            name = layer_name(value.path)
        else:
            name = module_of(node) or "weight"
        self._calls[name] = count = self._calls.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def constant(self, shape: tuple[int, ...], name: str = "a constant") -> ChannelSignal:
        """An activation that never scales; `name` says what it is."""
        return ChannelSignal(torch.tensor(self.classes.source(name)).expand(shape))

    def prints_of(self, signal: ChannelSignal) -> Tensor:
        """The fingerprint, or a random one for a signal of which nothing is known but that it does not scale."""
        if signal.prints is not None:
            return signal.prints
        if self.classes.all_fixed(signal.labels):
            return self.random(*signal.shape)
        return torch.zeros((), dtype=torch.float64).expand(signal.shape)

    def signal(self, value: Any, layer: str | None = None) -> ChannelSignal:
        """Anything with a shape as an activation; a parameter becomes one whose entries are all channels."""
        if isinstance(value, ChannelSignal):
            return value
        if isinstance(value, Tensor):
            return self.constant(tuple(value.shape))
        if isinstance(value, ParameterView):
            shape = self.shapes[value.path]
            slot = entries_slot(value.path, shape)
            labels = self.classes.fresh(slot.shape[1])
            self.uses.append(Use(layer or value.path, slot, labels, None))
            return ChannelSignal(value.view(labels.view(shape)), value.view(self.random(*shape)))
        return self.constant(())

    def produce(self, layer: str, slot: Slot, inp: Tensor | None, prints: Tensor | None) -> Tensor:
        """A weight at work: fresh labels (G·O,) for what it makes; it reads channels with labels `inp` (G·I,)."""
        out = self.classes.fresh(slot.outputs)
        self.uses.append(Use(layer, slot, out, inp, prints))
        return out

    def add_bias(self, layer: str, bias: Any, out: Tensor) -> None:
        """A bias with one entry per output channel joins the producers of these channels."""
        if bias is None:
            return
        self.classes.unite(self.signal(bias, layer).labels.reshape(-1), out, "{} is added as a bias")

    def pass_through(self, labels: Tensor, a: SimpleNamespace) -> None:
        """These channels pass the operator of a call; its `conservation` says which law survives that."""
        self.classes.pass_through(labels, a.op, linear=a.row.conservation == "matrix")

    def unknown(self, node: torch.fx.Node, values: list[Any], name: str, *, listed: bool = True) -> Any:
        """A function that is not positively homogeneous, or not in the table (`listed`): what enters it keeps its scale."""
        signals = [self.signal(value) for value in values]
        name = written_name(node, name)
        reason = Break(name, function=True, listed=listed)
        if "set_grad" in name:
            reason = Break("part of it runs without gradients")
        for signal in signals:
            self.classes.pin(signal.labels, reason)
        shapes = shapes_of(node)
        same = [s for s in signals if s.shape == shapes and self.classes.channels(s.labels)]
        if len(same) == 1:
            return ChannelSignal(same[0].labels)
        labels = [label for signal in signals for label in self.classes.distinct(signal.labels)]
        channels = [label for label in labels if label > 0]
        for other in channels[1:]:
            self.classes.join(channels[0], other, "")
        label = next(iter([*channels[:1], *labels[:1]]), self.classes.source("a constant"))
        return fill(shapes, lambda shape: ChannelSignal(torch.tensor(label).expand(shape)))


def fill(shapes: Any, make: Callable[[tuple[int, ...]], Any]) -> Any:
    """Nested tuples with a value for every shape."""
    if isinstance(shapes, list):
        return tuple(fill(shape, make) for shape in shapes)
    return None if shapes is None else make(shapes)


def view_shape(value: Any) -> tuple[int, ...]:
    """The shape of a parameter's view, of an activation or of a constant."""
    if isinstance(value, ParameterView):
        return tuple(value.view(torch.empty(value.shape, device="meta")).shape)
    return tuple(value.shape)


def projected(ctx: ChannelContext, prints: Tensor | None, axis: int) -> Tensor | None:
    """Two random projections of the fingerprint of every channel along `axis`: (channels, 2)."""
    if prints is None:
        return None
    rows = prints.movedim(axis, 0).reshape(prints.shape[axis], -1)
    return rows @ ctx.random(rows.shape[1], 2)
