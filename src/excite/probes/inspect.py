"""Run a model over data and inspect the inputs of every affine call, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.calls import Batch, batch_size, call, check_finite, own_copy, tensors
from excite._core.checks import check_count
from excite._core.intercept.affine import AffineCall, Names
from excite._core.preserve import device_of, eval_mode
from excite._core.wrappers import eagerly, refuse_lazy, unwrap
from excite.errors import ExciteError, InputError, ModelError
from excite.probes.activation_rank.samples import Live
from excite.probes.layer_inputs import LayerInputs, Patches, layer_inputs, unit_rows
from excite.wiring.activations import UnitMode

Inputs = Callable[[Any], Batch]
Visit = Callable[[str, AffineCall, LayerInputs, Tensor | None], None]


class CaptureInputs(UnitMode):
    """Collects what every affine call sees in one forward pass. `counts` says how many items each has seen before."""

    def __init__(self, names: Names, patches: Patches, seed: int, active: bool, counts: dict[str, int]):
        super().__init__(names)
        self.patches, self.seed, self.active, self.counts = patches, seed, active, counts
        self.captured: list[CapturedCall] = []

    def visit(self, call: AffineCall) -> Tensor:
        """Runs an affine call, and records its inputs while active."""
        return super().visit(call) if self.active else self.called(call)

    def called(self, call: AffineCall) -> Tensor:
        """Runs an affine call and records its inputs."""
        x = call.input
        if x.is_floating_point():
            first = self.counts.get(call.name, 0)
            inputs = layer_inputs(call, x, None, self.patches, first=first, seed=self.seed)
            self.counts[call.name] = first + inputs.items
            if inputs.rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                # A copy: the model may change this tensor in place later.
                inputs = replace(inputs, rows=inputs.rows.clone())
            number = len(self.judged) if self.active else -1
            self.captured.append(CapturedCall(call, x.shape, inputs, first, number))
        output = call.run(x)
        if self.active and x.is_floating_point():
            # Where no activation follows, the output's own sign counts; it may be changed in place as well.
            self.captured[-1].own = output > 0
        return output

    def units(self, captured: CapturedCall) -> Tensor | None:
        """(R, units): which rows activate which unit, once the pass is over."""
        if not self.active:
            return None
        positive = self.positive(captured.number, lambda: captured.own)
        return unit_rows(captured.call, captured.shape, positive, self.patches, first=captured.first, seed=self.seed)


@dataclass
class CapturedCall:
    """One affine call: the shape of its input, what it sees of it, the number of its first item, and of the call itself."""

    call: AffineCall
    shape: torch.Size
    inputs: LayerInputs
    first: int
    number: int
    own: Any = None


def inspect_layers(
    model: nn.Module,
    data: Iterable[Batch],
    visit: Visit,
    *,
    patches: Patches,
    seed: int,
    active: bool = False,
    notes: dict[str, str] | None = None,
) -> int:
    """Calls visit(layer, call, inputs, live) for every affine call of every batch; returns the number of points.

    `live` (R,) says which rows belong to points at which the model's output is not zero, None if all do or it is not
    known. With `active` the units are judged, and `notes` gets remarks about that, by layer. The model runs in
    evaluation mode and is left as it was.
    """
    model = unwrap(model)
    refuse_lazy(model)
    names, counts, points, device = Names(model), {}, 0, device_of(model)  # type: ignore[var-annotated]
    zero = Live(model)
    with torch.no_grad(), eval_mode(model), eagerly(model):
        for batch in data:
            points += batch_size(batch)
            check_finite(batch)
            moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, own_copy(batch))
            mode = CaptureInputs(names, patches, seed, active, counts)
            try:
                with mode:
                    output = call(model, own_copy(moved) if active else moved)
            except ExciteError:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                shapes = ", ".join(str(tuple(t.shape)) for t in tensors(batch))
                reason = str(error).split("\n")[0]
                raise InputError(f"the model does not run on inputs of shape {shapes}: {reason}") from error
            counted = zero.of(moved, output) if active else None
            for layer_input in mode.captured:
                inputs = replace(layer_input.inputs, active=mode.units(layer_input))
                if notes is not None and active and (before := mode.note(layer_input.number)):
                    notes[layer_input.call.name] = f"judged before {before}, which mixes units before their activation"
                visit(
                    layer_input.call.name,
                    layer_input.call,
                    inputs,
                    counted(layer_input.call, layer_input.shape, inputs) if counted else None,
                )
    if notes is not None:
        for name in zero.unknown:
            notes[name] = "points at which the output is zero count too: samples cannot be separated in its input"
    if not points:
        raise InputError("expected at least one point; got an empty dataset")
    if not counts:
        raise ModelError("the model has no affine layer that can be seen: expected linear layers or convolutions")
    return points


class Batches:
    """Data as batches, as often as needed: a tensor (N, ...), a tuple or dict of them, or a loader of batches.

    Of what a loader yields, a list or tuple counts as (inputs, labels, ...): the first is taken. `inputs` says otherwise:
    a function from what the loader yields to what the model is called with (tensor, tuple or dict).
    """

    def __init__(self, data: Any, batch: int, inputs: Inputs | None = None):
        batch = check_count(batch, "batch")
        self._data, self._batch, self._inputs = data, batch, inputs
        self.in_memory = isinstance(data, Tensor | tuple | dict)
        if self.in_memory:
            sizes = {len(t) if t.dim() else 0 for t in tensors(data)}
            if 0 in sizes or len(sizes) > 1:
                shapes = ", ".join(str(tuple(t.shape)) for t in tensors(data))
                raise InputError(f"expected inputs with the same number of points, at least one; got {shapes}")
            self._size = sizes.pop()
        elif not isinstance(data, Iterable) or isinstance(data, str):
            raise InputError(f"expected a tensor, or a loader that yields batches; got {type(data).__name__}")
        self.single_pass = isinstance(data, Iterator)

    def __iter__(self) -> Iterator[Batch]:
        if self.in_memory:
            for start in range(0, self._size, self._batch):
                rows = slice(start, start + self._batch)
                yield tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, self._data)  # noqa: B023
            return
        for item in self._data:
            if self._inputs is not None:
                yield self._inputs(item)
            elif isinstance(item, list | tuple):
                if not item:
                    raise InputError("expected batches from the loader; got an empty list")
                yield item[0]
            else:
                yield item
