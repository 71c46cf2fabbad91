"""See every activation of a model while it runs: what enters it, and which affine calls that comes from.

Between an affine call and its activation may stand a normalization, a residual sum, a bias, a scale, dropout. What decides
whether a unit is active is the input of the activation, not the output of the affine call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from excite._core.intercept.affine import AffineCall, AffineMode, Names
from excite.wiring.operators import OPERATORS
from excite.wiring.operators.activations import BENT
from excite.wiring.operators.movement import SAME, VIEWS

_TWO = ("maximum", "minimum", "fmax", "fmin", "max", "min")  # of two tensors
_COMPARED = ("gt", "ge", "lt", "le")  # an activation of the user's own: x * (x > 0), torch.where(x > 0, x, 0)
_ABOVE_ZERO = ("minimum", "fmin", "min", "lt", "le")  # active above 0 rather than above the other operand
# Python functions without an operator of their own, made of smooth ones.
_COMPOSITE = frozenset(("softsign", "tanhshrink"))
# Functions that move numbers and change none: replayed on the numbers of the elements they show which went where.
_MOVES = frozenset(VIEWS) | {
    "view_as", "reshape_as", "adjoint", "__get__", "__getitem__", "index_select", "cat", "concat", "concatenate", "stack",
    "hstack", "vstack", "dstack", "expand", "expand_as", "repeat", "tile", "pixel_shuffle", "pixel_unshuffle",
    "channel_shuffle",
}  # fmt: skip
_SAME = frozenset(SAME) | {"float", "double", "half", "dropout", "dropout1d", "dropout2d", "dropout3d"}
_MIXES = {"matmul", "mm", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention", "softmax", "log_softmax"}


@dataclass(frozen=True)
class ActivationCall:
    """One activation as it is called.

    `kinks`: where each piece begins that an element of `input` can be on, each a number or a tensor like `input`; a smooth activation
    has one at 0 although it has no pieces.
    """

    name: str
    input: Tensor
    kinks: tuple[Any, ...]
    smooth: bool = False

    def positive(self) -> Tensor:
        """Where a unit is active: above the first kink, where that is the lower end; else above 0."""
        row = OPERATORS.get(self.name)
        lower = self.name not in _ABOVE_ZERO and (row is None or row.activation is None or row.activation.lower)
        return self.input > (self.kinks[0] if lower else 0.0)


class ActivationMode(AffineMode):
    """While active, `activated(activation)` is called before every activation, whoever makes it."""

    def activated(self, activation: ActivationCall) -> None:
        """Called with what enters an activation; it may be changed in place afterwards."""

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs any other function, and reports it to `activated` if it is an activation."""
        activation = recognize(_name(function), args, kwargs)
        if activation is not None:
            self.activated(activation)
        return function(*args, **kwargs)


def _name(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", "")
    return name if name.startswith("__") else name.strip("_")


def recognize(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActivationCall | None:
    """The activation that a call of a function is, by the operator table; None if it is none."""
    remaining = dict(kwargs)
    x, after = (args[0], args[1:]) if args else (remaining.pop("input", None), ())
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    row = OPERATORS.get(name)
    activation = BENT if name in _COMPOSITE else None if row is None else row.activation
    if activation is not None:
        kinks = tuple(at for at in activation.kinks(*after, **remaining) if at is not None)
        lower = after[0] if after else remaining.get("min")
        if name in ("clamp", "clip") and lower is None:
            name = "clamp_max"
        return ActivationCall(name, x, kinks, activation.smooth) if kinks else None
    if name in _TWO or name in _COMPARED:
        other = after[0] if after else remaining.get("other")
        if isinstance(other, Tensor) and other.is_floating_point():
            return ActivationCall(name, x, (other,))
        if name in _COMPARED and isinstance(other, int | float):
            return ActivationCall(name, x, (float(other),))
    return None


def table_activation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ActivationCall | None:
    """The activation that a call is, if it is an operator of the table; comparisons and maxima of the user's own are not."""
    name = _activation_name(function)
    return None if name is None else recognize(name, args, kwargs)


@lru_cache(maxsize=4096)
def _activation_name(function: Callable[..., Any]) -> str | None:
    """The name of an operator of the table that is an activation; remembered, since it is asked for every function a model calls."""
    name = _name(function)
    row = OPERATORS.get(name)
    return None if row is None or row.activation is None else name


# -- from affine calls to activations -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Move:
    """A function that moved numbers, its arguments with shapes in place of tensors, and which of its outputs is meant."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensor_index: int  # number of the tensor that is followed, among the tensors of the arguments
    output: int | None  # None: the only one

    def replay(self, index: Tensor) -> Tensor:
        count = -1

        def fill(leaf: _Shape) -> Tensor:
            nonlocal count
            count += 1
            if count == self.tensor_index:
                return index
            return leaf.index if leaf.index is not None else index.new_full(leaf.shape, -1)

        args = _mapped(fill, _Shape, self.args)
        moved = self.function(*args, **{key: _mapped(fill, _Shape, value) for key, value in self.kwargs.items()})
        return moved if self.output is None else moved[self.output]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Shape:
    shape: torch.Size
    index: Tensor | None  # an index is kept as it is


@dataclass(frozen=True)
class _Trail:
    """How the outputs of an affine call came to a tensor.

    Once a function mixed elements (`mixed_by`), `positive` says where they were positive before it; `exact` if that is what an activation
    after it would say (maxima).
    """

    moves: tuple[_Move, ...] = ()
    mixed_by: str = ""
    positive: Tensor | None = None
    exact: bool = False


@dataclass(frozen=True)
class Judged:
    """Where the inputs of an activation are positive, and how its elements came from an affine call's output."""

    positive: Tensor
    moves: tuple[_Move, ...]
    before: str = ""  # the function before which it was judged, because no activation follows element by element


class UnitMode(ActivationMode):
    """Follows the output of every affine call to the first activation that it reaches, element by element."""

    def __init__(self, names: Names):
        super().__init__(names)
        self.judged: list[list[Judged]] = []  # by affine call, in order of execution
        self._trails: Any = WeakTensorKeyDictionary()  # tensor -> {number of the affine call: trail}

    def visit(self, call: AffineCall) -> Tensor:
        """Runs an affine call and starts to follow its output."""
        output = self.called(call)
        self._trails[output] = {len(self.judged): _Trail()}
        self.judged.append([])
        return output

    def called(self, call: AffineCall) -> Tensor:
        """Runs an affine call; subclasses override this to inspect it."""
        return call.run(call.input)

    def activated(self, activation: ActivationCall) -> None:
        """Records which elements of an activation's input are positive."""
        self._judge(activation.input, activation)
        for kink in activation.kinks:
            if isinstance(kink, Tensor):  # the other of two
                self._judge(kink, replace(activation, input=kink, kinks=(activation.input,)))

    def _settled(self, number: int) -> bool:
        """Whether every element has reached an activation: what a later one says does not count."""
        return any(not activation.moves for activation in self.judged[number])

    def _judge(self, x: Tensor, activation: ActivationCall) -> None:
        trails = self._trails.get(x)
        if not trails:
            return
        positive = None
        for number, trail in trails.items():
            if self._settled(number):
                continue
            if trail.positive is not None:
                before = "" if trail.exact else trail.mixed_by
                self.judged[number].append(Judged(trail.positive, trail.moves, before))
                continue
            if positive is None:
                positive = activation.positive()
            if positive.shape == x.shape:  # else two operands of maximum were expanded to one shape
                self.judged[number].append(Judged(positive, trail.moves))

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs any other function, and follows outputs of affine calls through it."""
        name = _name(function)
        activation = recognize(name, args, kwargs)
        if activation is not None:
            self.activated(activation)
        output = function(*args, **kwargs)
        if activation is not None:
            if name not in _COMPARED and isinstance(output, Tensor):
                self._trails.pop(output, None)  # in place: what leaves an activation is no input of the next
            return output
        outputs = [output] if isinstance(output, Tensor) else output if isinstance(output, tuple | list) else ()
        outputs = [
            (i, output) for i, output in enumerate(outputs) if isinstance(output, Tensor) and output.is_floating_point()
        ]
        if not outputs or name in _MIXES:
            return output
        before = [(i, t, self._trails.get(t)) for i, t in enumerate(_tensors(args, kwargs))]
        before = [(i, t, trails) for i, t, trails in before if trails]
        if before:
            retained = _without_tensors(args, kwargs) if name in _MOVES else None
            for i, tensor in outputs:
                output_index = None if isinstance(output, Tensor) else i
                self._trails[tensor] = self._followed(function, name, before, retained, tensor, output_index)
        return output

    def _followed(
        self,
        function: Callable[..., Any],
        name: str,
        before: list[tuple[int, Tensor, dict[int, _Trail]]],
        retained: tuple[tuple[Any, ...], dict[str, Any]] | None,
        output: Tensor,
        output_index: int | None,
    ) -> dict[int, _Trail]:
        trails: dict[int, _Trail] = {}
        for own, tensor, sources in before:
            snapshot = None
            for number, trail in sources.items():
                if self._settled(number):
                    continue
                if trail.positive is not None:
                    trail = replace(trail, exact=trail.exact and (retained is not None or name in _SAME))
                elif retained is not None:
                    trail = replace(trail, moves=(*trail.moves, _Move(function, *retained, own, output_index)))
                elif output.shape != tensor.shape:
                    snapshot = tensor > 0 if snapshot is None else snapshot
                    trail = replace(trail, mixed_by=name, positive=snapshot, exact="max" in name)
                trails.setdefault(number, trail)
        return trails

    def positive(self, number: int, own: Callable[[], Tensor]) -> Tensor:
        """Where the units of an affine call are active, in the layout of its output.

        It is read for each element at the first activation it reaches; elements that reach none, as those of the output layer, are active
        where `own()`, the output, is positive.
        """
        judged = self.judged[number]
        if judged and not judged[0].moves:  # the usual case: every element
            return judged[0].positive
        above_zero = own() > 0
        if not judged:
            return above_zero
        size, device = above_zero.numel(), above_zero.device
        decided = torch.full((size,), -1, dtype=torch.int8, device=device)
        for activation in judged:
            at = torch.arange(size, device=device).view(above_zero.shape)
            for move in activation.moves:
                at = move.replay(at)
            # One slot more, for elements that do not come from this call.
            current = torch.full((size + 1,), -1, dtype=torch.int8, device=device)
            at = torch.where(at < 0, size, at).flatten()
            current.scatter_reduce_(0, at, activation.positive.flatten().to(torch.int8), "amax")
            decided = torch.where(decided < 0, current[:-1], decided)
        decided = decided.view(above_zero.shape)
        return torch.where(decided < 0, above_zero, decided > 0)

    def note(self, number: int) -> str:
        """The function before which units were judged, because elements are mixed before their activation; mostly empty."""
        return next((activation.before for activation in self.judged[number] if activation.before), "")


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from _tensors(tuple(value), {})


def _without_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def bare(tensor: Tensor) -> _Shape:
        return _Shape(tensor.shape, None if tensor.is_floating_point() else tensor.clone())

    return _mapped(bare, Tensor, args), {key: _mapped(bare, Tensor, value) for key, value in kwargs.items()}


def _mapped(change: Callable[[Any], Any], leaf_type: type, value: Any) -> Any:
    """`value` with every leaf of this kind changed, in the order of `_tensors`."""
    if isinstance(value, leaf_type):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, leaf_type, member) for member in value)
    return value
