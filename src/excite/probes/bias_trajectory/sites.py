"""The layers that the trajectory probe measures: affine calls of a model, the modules that make them, and the batch axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, call
from excite._core.intercept.affine import AffineCall, AffineMode, Names, clean_path
from excite._core.preserve import preserve_state
from excite._core.wrappers import eagerly, in_reentrant_checkpoint, without_reentrant_checkpointing
from excite.errors import ExciteError, InputError, ModelError
from excite.wiring.export import does_not_run, resized
from excite.wiring.operators import OPERATORS

# Python functions that are made of smooth operators.
_COMPOSITE = {"logsigmoid", "softsign", "normalize"}


def _is_smooth(function: str) -> bool:
    """Whether a network is not piecewise linear after this function: slopes then hold at the point, not in a region."""
    row = OPERATORS.get(function)
    smooth = row is not None and row.pieces is not None and row.pieces.linearity == "smooth"
    return smooth or function in _COMPOSITE


@dataclass(frozen=True)
class TracedLayer:
    """One affine call z = A x + b.

    `module` is the path of the module that returns z, at its `turn`-th call in one forward pass; None for a bare functional call.
    `axis` is the batch axis of z, `in_axis` that of x; `shape` is that of x for two samples, `out_shape` that of z for one. With `merged` the
    call has samples times places in its first axis, and its module returns z with an axis for each, as Conv1D of Transformers does.
    """

    name: str
    module: str | None
    turn: int
    axis: int
    in_axis: int
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    bias: str | None  # path of the bias, if it is a parameter
    trained: bool  # whether training computes a gradient at z
    call: AffineCall = field(repr=False, compare=False)
    live: bool = True  # whether the call holds the parameter itself, not a weight computed on the fly
    checkpointed: bool = False  # whether it runs under reentrant checkpointing, without gradients
    merged: bool = False

    def separated(self, z: Tensor, samples: int) -> Tensor:
        """z of the call, or its gradient, with an axis for samples: as its module returns it."""
        if not self.merged:
            return z
        result: Tensor = z.unflatten(0, (samples, -1))
        return result


@dataclass
class _RecordedCall:
    call: AffineCall
    output: Tensor
    module: str | None = None
    turn: int = 0
    checkpointed: bool = False
    separate: tuple[int, ...] | None = (
        None  # the shape in which the module returns the output, if it separates the first axis
    )

    def returned_by(self, path: str, turn: int, returned: object) -> None:
        """Takes the module as the owner if it returns the output, or the output with its first axis separated into two."""
        if self.module is not None or not isinstance(returned, Tensor):
            return
        if returned is self.output:
            self.module, self.turn = path, turn
        elif (
            returned.dim() == self.output.dim() + 1
            and returned.shape[2:] == self.output.shape[1:]
            and returned.data_ptr() == self.output.data_ptr()
            and returned.is_contiguous()
            and returned.numel() == self.output.numel()
        ):
            self.module, self.turn, self.separate = path, turn, tuple(returned.shape)


class Finder(AffineMode):
    """Records every affine call with its output, and the names of all other functions."""

    def __init__(self, names: Names):
        super().__init__(names)
        self.calls: list[_RecordedCall] = []
        self.functions: set[str] = set()

    def visit(self, call: AffineCall) -> Tensor:
        """Runs an affine call and records it with its output."""
        output = call.run(call.input)
        self.calls.append(_RecordedCall(call, output, checkpointed=in_reentrant_checkpoint()))
        return output

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs any other function and records its name."""
        self.functions.add(getattr(function, "__name__", "").rstrip("_"))
        return function(*args, **kwargs)


@dataclass(frozen=True)
class TracedLayers:
    """The chosen calls of a model in order of execution, the first affine call, and whether the model has smooth parts."""

    chosen: tuple[TracedLayer, ...]
    first: TracedLayer
    smooth: bool

    def __getitem__(self, name: str) -> TracedLayer:
        return next(site for site in self.chosen if site.name == name)


def find(model: nn.Module, example: Batch, layers: str | Sequence[str] = "first") -> TracedLayers:
    """The first affine call, all of them ("all": of every hidden layer, and of the output layer), or those named.

    Runs the model in its own mode on two and on three samples of the example and leaves it as it was.
    """
    two = _run(model, resized(example, 2))
    if not two.calls:
        raise ModelError("the model has no affine layer that can be seen: expected linear layers or convolutions")
    try:
        three: list[_RecordedCall] | None = _run(model, resized(example, 3)).calls
    except ExciteError:
        three = None
    if three is not None and [f.call.name for f in three] != [f.call.name for f in two.calls]:
        three = None
    names = [f.call.name for f in two.calls]
    if layers == "first":
        chosen = names[:1]
    elif layers == "all":
        chosen = names
    elif isinstance(layers, str) or not all(isinstance(name, str) for name in layers):
        raise InputError(f"layers: expected 'first', 'all' or a list of names; got {layers!r}")
    else:
        chosen = list(layers)
        missing = [name for name in chosen if name not in names]
        if missing or not chosen:
            raise InputError(f"layers: the model has no layer {missing or chosen!r}; it has {', '.join(names)}")
    known = Names(model)
    sites = {
        f.call.name: _site(f, three[i] if three is not None else None, known)
        for i, f in enumerate(two.calls)
        if f.call.name in chosen or i == 0
    }
    return TracedLayers(
        tuple(sites[name] for name in names if name in chosen), sites[names[0]], any(map(_is_smooth, two.functions))
    )


def _run(model: nn.Module, batch: Batch) -> Finder:
    """One pass with gradients; hooks on the modules find out which module makes which call."""
    finder = Finder(Names(model))
    counts: dict[str, int] = {}

    def returned(path: str, output: Any) -> None:
        counts[path] = counts.get(path, 0) + 1
        for site in finder.calls:
            site.returned_by(path, counts[path], output)

    handles = [
        module.register_forward_hook(lambda _, __, output, path=path: returned(path, output))
        for path, module in model.named_modules()
    ]
    try:
        with preserve_state(model), torch.enable_grad(), eagerly(model), without_reentrant_checkpointing(), finder:
            call(model, batch)
    except ExciteError:
        raise
    except Exception as error:
        raise does_not_run(error, batch) from error
    finally:
        for handle in handles:
            handle.remove()
    return finder


def _site(two: _RecordedCall, three: _RecordedCall | None, names: Names) -> TracedLayer:
    call = two.call
    shape, out_shape = tuple(call.input.shape), tuple(two.output.shape)
    merged = _merged(two, three)
    if merged and two.separate is not None:
        axis = in_axis = 0
        shape, out_shape = (*two.separate[:2], *shape[1:]), two.separate
    else:
        axis = _batch_axis(call.name, out_shape, three.output.shape if three else None)
        in_axis = _batch_axis(call.name, shape, three.call.input.shape if three else None)
    live = all(names.parameter(weight) is not None for weight in call.weights)
    if three is not None and [w.shape for w in call.weights] != [w.shape for w in three.call.weights]:
        raise ModelError(
            f"layer {call.name!r}: its weight is repeated for every sample, as in torch.bmm(x, weight.expand(len(x), -1, -1)): "
            "use a product that broadcasts, x @ weight, or choose other layers="
        )
    return TracedLayer(
        call.name,
        two.module if merged or two.separate is None else None,
        two.turn,
        axis,
        in_axis,
        shape,
        tuple(n for i, n in enumerate(out_shape) if i != axis),
        _bias(call, names),
        two.output.requires_grad,
        call.without_input(detached=not live),
        live,
        two.checkpointed,
        merged,
    )


def _merged(two: _RecordedCall, three: _RecordedCall | None) -> bool:
    """Whether a call has samples times places in its first axis, and its module returns an axis for each, samples in front."""
    if two.separate is None or three is None or three.separate is None or two.call.input.shape[0] != len(two.output):
        return False
    return (two.separate[0], three.separate[0]) == (2, 3) and two.separate[1:] == three.separate[1:]


def _bias(call: AffineCall, names: Names) -> str | None:
    path = names.parameter(call.bias)
    return None if path is None else clean_path(path)


def _batch_axis(name: str, two: Sequence[int], three: Sequence[int] | None) -> int:
    if three is None:
        if len(two) and two[0] == 2:
            return 0
    elif len(two) == len(three):
        axes = [i for i, (a, b) in enumerate(zip(two, three)) if a != b]
        if len(axes) == 1 and (two[axes[0]], three[axes[0]]) == (2, 3):
            return axes[0]
    merged = [] if three is None else [a // 2 for a, b in zip(two, three) if a != b and 3 * a == 2 * b]
    why = (
        f", whose first axis merges the batch with {merged[0]} places per sample, as x.view(-1, x.size(-1)) does"
        if len(merged) == 1 and three is not None and two[0] != three[0]
        else ""
    )
    raise ModelError(
        f"layer {name!r}: samples cannot be separated in a tensor of shape {tuple(two)} for two samples{why}: "
        "choose layers= whose tensors have an axis for the batch alone"
    )
