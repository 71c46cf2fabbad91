"""Where the channels of a group stand inside a parameter.

Whatever the operation, the weight is seen as a tensor with four axes (G, O, I, K): blocks that do not talk to each other
(grouped convolutions), outputs per block, inputs per block, and the rest (the kernel, the words of an embedding).
Output channel (g, o) owns the entries [g, o, :, :], input channel (g, i) owns [g, :, i, :].
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Step = tuple[Callable[..., Any], tuple[Any, ...], tuple[tuple[str, Any], ...]]


def replay(steps: tuple[Step, ...], tensor: Any) -> Any:
    """Apply a chain of view operations to another tensor of the same shape."""
    for function, args, kwargs in steps:
        if function in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            function = torch.ops.aten.reshape.default  # labels and gradients need not have the parameter's strides
        tensor = function(tensor, *args, **dict(kwargs))
    return tensor


def _hashable(value: Any) -> Any:
    """With tuples for lists, such as the sizes of an expansion."""
    return tuple(map(_hashable, value)) if isinstance(value, tuple | list) else value


@dataclass(frozen=True)
class ParameterView:
    """A parameter, or a view of one, on its way to being used."""

    path: str
    shape: tuple[int, ...]  # of the parameter itself
    steps: tuple[Step, ...] = ()

    def then(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> ParameterView:
        """The parameter after one more view operation."""
        return ParameterView(
            self.path, self.shape, (*self.steps, (function, _hashable(args), _hashable(tuple(kwargs.items()))))
        )

    def item(self, index: int) -> ParameterView:
        """One of several tensors that the last operation returned."""
        return self.then(operator.getitem, index)

    def view(self, tensor: Tensor) -> Tensor:
        """Another tensor of the parameter's shape, through the same operations."""
        return replay(self.steps, tensor)  # type: ignore[no-any-return]

    def entries(self) -> Tensor:
        """The position of every entry of the view in the flattened parameter."""
        return self.view(torch.arange(_numel(self.shape)).view(self.shape))


@dataclass(frozen=True)
class Slot:
    """A weight as (G, O, I, K): permute the view by `order`, reshape to `shape`, exchange O and I if `swapped`.

    `axes` are the axes of the parameter that carry output and input channels, where one axis does.
    """

    source: ParameterView
    shape: tuple[int, int, int, int]
    order: tuple[int, ...] | None = None
    swapped: bool = False
    axes: tuple[int | None, int | None] = (None, None)

    def canonical(self, tensor: Tensor) -> Tensor:
        """A tensor with the parameter's shape as (G, O, I, K)."""
        tensor = self.source.view(tensor)
        if self.order is not None:
            tensor = tensor.permute(self.order)
        tensor = tensor.reshape(self.shape)
        return tensor.transpose(1, 2) if self.swapped else tensor

    def out_rows(self, tensor: Tensor) -> Tensor:
        """(G·O, I·K): one row per output channel."""
        return self.canonical(tensor).flatten(2).flatten(0, 1)

    def in_rows(self, tensor: Tensor) -> Tensor:
        """(G·I, O·K): one row per input channel."""
        return self.canonical(tensor).transpose(1, 2).flatten(2).flatten(0, 1)

    @property
    def blocks(self) -> int:
        """The number of blocks G."""
        return self.shape[0]

    @property
    def outputs(self) -> int:
        """G·O, the number of output channels."""
        return self.shape[0] * self.shape[2 if self.swapped else 1]

    @property
    def inputs(self) -> int:
        """G·I, the number of input channels."""
        return self.shape[0] * self.shape[1 if self.swapped else 2]


@dataclass
class Use:
    """One use of a parameter: labels of the channels it makes (G·O,) and of those it reads (G·I,), if it does.

    `prints` are the fingerprints of what it reads, one row per input channel: see `Signal`.
    """

    layer: str
    slot: Slot
    out: Tensor | None
    inp: Tensor | None
    prints: Tensor | None = None


def entries_slot(path: str, shape: tuple[int, ...]) -> Slot:
    """A parameter whose every entry is a channel of its own, as a bias or the scale of a normalization."""
    return Slot(ParameterView(path, shape), (1, _numel(shape), 1, 1), axes=(0, None))


def scale_slot(view: ParameterView, count: int) -> Slot:
    """A parameter that multiplies channels one by one: blocks of one output and one input each."""
    return Slot(view, (count, 1, 1, 1), axes=(0, 0))


def linear_slot(view: ParameterView, outputs: int, inputs: int) -> Slot:
    """The weight of a linear layer (outputs, inputs)."""
    return Slot(view, (1, outputs, inputs, 1), axes=(0, 1) if not view.steps else (None, None))


def embedding_slot(view: ParameterView, tokens: int, width: int) -> Slot:
    """The weight of an embedding (words, width)."""
    return Slot(view, (1, width, 1, tokens), order=(1, 0), axes=(1, None) if not view.steps else (None, None))


def conv_slot(view: ParameterView, weight: tuple[int, ...], groups: int, transposed: bool) -> Slot:
    """The weight of a convolution, in blocks if it is grouped."""
    kernel = _numel(weight[2:])
    plain = not view.steps
    if transposed:  # (inputs, outputs per block, kernel...)
        shape = (groups, weight[0] // groups, weight[1], kernel)
        return Slot(view, shape, swapped=True, axes=(1, 0) if plain else (None, None))
    shape = (groups, weight[0] // groups, weight[1], kernel)
    return Slot(view, shape, axes=(0, 1) if plain else (None, None))


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
