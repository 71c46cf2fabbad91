"""The affine layers of a model in order of execution, with shapes that do not mention the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from excite._core.calls import Batch, Pick, pick_output
from excite._core.intercept.affine import AffineCall, AffineMode, Names
from excite._core.intercept.parameters import TRANSFORMED, Roles, sentence
from excite.errors import ExciteError, ModelError
from excite.wiring.export import does_not_run, resized, run


@dataclass(frozen=True)
class Layer:
    """One affine call.

    Attributes:
        name: The weight's path without `.weight`; the second call of a weight is `name#2`.
        kind: "linear" or "conv" (transposed convolutions too).
        in_shape: Shape of the input of one sample, without the batch axis wherever it stands. Where the batch is merged with
            another axis, as (time · batch, features) inside attention, only the batch is removed: (time, features). Padding
            and unfolding belong to the layer: it is the shape of the tensor in front of them.
        out_shape: Shape of the output of one sample, likewise.
        weight: The weight as the call gets it, sharing memory with the model's parameters.
        bias: The bias likewise, if there is one.
        weight_name: Path of the weight; None if it is computed in the forward pass.
        bias_name: Path of the bias; None if there is none or it is computed.
        role: What it does in a transformer: "layer 3, query", "layer 3, MLP gate", "output"; empty where that is not known.

    Example:
        >>> layer = excite.trace(nn.Conv2d(1, 4, 3), torch.zeros(2, 1, 8, 8)).layers[0]
        >>> layer.kind, layer.in_shape, layer.out_shape
        ('conv', (1, 8, 8), (4, 6, 6))
    """

    name: str
    kind: str
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    weight: Tensor = field(repr=False, compare=False)
    bias: Tensor | None = field(repr=False, compare=False)
    weight_name: str | None
    bias_name: str | None
    role: str = ""

    @property
    def parameters(self) -> int:
        """Number of entries of weight and bias."""
        return self.weight.numel() + (self.bias.numel() if self.bias is not None else 0)


@dataclass
class _RecordedCall:
    call: AffineCall
    input: tuple[int, ...]
    output: tuple[int, ...]


class _Recorder(AffineMode):
    def __init__(self, names: Names):
        super().__init__(names)
        self.calls: list[_RecordedCall] = []
        self.hidden: list[str] = []

    def visit(self, call: AffineCall) -> Tensor:
        output = super().visit(call)
        self.calls.append(_RecordedCall(call, tuple(call.input.shape), tuple(output.shape)))
        return output

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hidden.append(function.__name__)
        return super().opaque(function, args, kwargs)


def record(model: nn.Module, batch: Batch, output: Pick) -> tuple[tuple[Layer, ...], dict[str, str], tuple[str, ...]]:
    """Returns the layers, the roles of parameters by path, and notes on what is not known."""
    names, roles = Names(model), Roles()
    first, returned = _run(model, names, resized(batch, 2), roles)
    pick_output(returned, output)
    notes = [f"{name} holds affine maps inside one kernel: they are not listed" for name in dict.fromkeys(first.hidden)]
    if not first.calls:
        hint = f" ({notes[0]})" if notes else f" (parameters are {TRANSFORMED})" if roles.inside_transforms else ""
        raise ModelError(
            "the model has no affine layer that Excite can see: expected at least one linear layer, convolution or "
            f"product with a parameter in its forward pass{hint}"
        )
    known, missing = roles.of(model)
    if missing:
        notes.append(sentence(missing))
    try:
        second: list[_RecordedCall] | None = _run(model, names, resized(batch, 3))[0].calls
    except ExciteError:
        second = None
    if second is None or [s.call.name for s in second] != [s.call.name for s in first.calls]:
        second = None
        notes.append(
            "shapes assume that the batch is the first axis: the model does not run the same for two and three samples"
        )
    layers = []
    for i, call in enumerate(first.calls):
        other = second[i] if second is not None else None
        layers.append(
            Layer(
                call.call.name,
                call.call.kind,
                _without_batch(call.input, other.input if other else None),
                _without_batch(call.output, other.output if other else None),
                call.call.weight.detach(),
                None if call.call.bias is None else call.call.bias.detach(),
                names.parameter(call.call.weight),
                names.parameter(call.call.bias),
            )
        )
    return tuple(layers), known, tuple(notes)


def _run(model: nn.Module, names: Names, batch: Batch, roles: Roles | None = None) -> tuple[_Recorder, Any]:
    recorder = _Recorder(names)
    recorder.roles = roles
    try:
        with recorder:
            returned = run(model, batch)
    except ExciteError:
        raise
    except Exception as error:
        raise does_not_run(error, batch) from error
    return recorder, returned


def _without_batch(two: tuple[int, ...], three: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of one sample, from the shapes for two and for three samples.

    Along the axis that differs, the sizes are 2k and 3k, of which k belong to the sample.
    """
    if three is None or len(two) != len(three):
        return two[1:] if two[:1] == (2,) else two
    shape: list[int] = []
    for a, b in zip(two, three):
        if 3 * a != 2 * b:
            shape.append(a)
        elif a > 2:
            shape.append(a // 2)
    return tuple(shape)
