"""Which sample of a batch the rows of a layer belong to, wherever the batch axis stands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from excite._core.calls import Batch, batch_size, call, own_copy, repeated
from excite._core.intercept.affine import AffineCall, AffineMode, Names
from excite._core.layout import Layout, find_layout
from excite.errors import ModelError
from excite.probes.layer_inputs import LayerInputs, linear_rows

Rows = Callable[[AffineCall, torch.Size, LayerInputs], Tensor | None]
_FEW = 8  # samples that are enough to determine layouts


class _Inputs(AffineMode):
    def __init__(self, names: Names):
        super().__init__(names)
        self.inputs: dict[str, Tensor] = {}

    def visit(self, call: AffineCall) -> Tensor:
        self.inputs[call.name] = call.input.detach().clone()
        return call.run(call.input)


class SampleLayouts:
    """Where the samples of a batch lie in the input of every affine call and in the output.

    Found by running the model on a few samples and on the same twice in a row, in the mode it is in: (B, T, D), (T, B, D),
    (T·B, D) and (B·T, D) are distinguished. `unknown` are the layers for which that fails.
    """

    def __init__(self, model: nn.Module, batch: Batch):
        size = batch_size(batch)
        chosen = torch.linspace(0, size - 1, min(size, _FEW)).round().long()

        def pick(leaf: Any) -> Any:
            has_samples = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size
            return leaf[chosen.to(leaf.device)] if has_samples else leaf

        few = tree_map(pick, batch)
        clean, twice = (_Inputs(Names(model)) for _ in range(2))
        with clean:
            output = call(model, own_copy(few))
        with twice:
            doubled_output = call(model, own_copy(repeated(few, 2)))
        self.inputs: dict[str, Layout | None] = {}
        self.unknown: set[str] = set()
        for name in clean.inputs.keys() & twice.inputs.keys():
            try:
                self.inputs[name] = find_layout(clean.inputs[name], twice.inputs[name], len(chosen), f"layer {name!r}")
            except ModelError:
                self.unknown.add(name)
        self.output: Layout | None = None
        if isinstance(output, Tensor) and isinstance(doubled_output, Tensor):
            with suppress(ModelError):
                self.output = find_layout(output, doubled_output, len(chosen), "the output")

    def live(self, output: Tensor, samples: int) -> Tensor | None:
        """(samples,): where the output is not zero; None if that is not known."""
        if self.output is None:
            return None
        return (self.output.by_sample(output, samples) != 0).any(1)

    def sample_index(self, call: AffineCall, shape: torch.Size, inputs: LayerInputs, samples: int) -> Tensor | None:
        """(R,): the sample that each row of `inputs` belongs to; None if there is none, or it is not known."""
        layout = self.inputs.get(call.name)
        if layout is None or shape[layout.axis] % (layout.outer * samples):
            return None
        n = shape[layout.axis]
        along = torch.arange(n) // (n // (layout.outer * samples)) % samples
        if call.kind != "linear":
            return along[inputs.sample_index] if layout.axis == 0 and n == inputs.items else None
        places = along.view([-1 if axis == layout.axis else 1 for axis in range(len(shape))]).expand(shape)
        rows = linear_rows(call, places.double())  # not every function that pads or unfolds takes whole numbers
        return rows[:, 0].long() if bool((rows == rows[:, :1]).all()) else None


class Live:
    """Theorem 1 on richness leaves out the points at which the network's output is zero: which rows those are.

    One instance serves many batches of one model; samples are located only where an output is zero.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.unknown: set[str] = set()  # layers whose rows could not be assigned to samples
        self._layouts: dict[object, SampleLayouts] = {}

    def of(self, batch: Batch, output: Any) -> Rows:
        """A function that says which rows of a layer count: (R,) bool, or None for all of them."""
        size = batch_size(batch)
        if not isinstance(output, Tensor) or not output.dim() or bool((output != 0).all()):
            return lambda call, shape, inputs: None
        layouts: SampleLayouts | None = None
        if size == 1:
            live: Tensor | None = (output != 0).any().reshape(1)
        else:
            key = tuple(tuple(leaf.shape[1:]) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            layouts = self._layouts.get(key) or self._layouts.setdefault(key, SampleLayouts(self.model, batch))
            live = layouts.live(output, size)
        if live is not None and bool(live.all()):
            return lambda call, shape, inputs: None
        if live is not None and not bool(live.any()):
            return lambda call, shape, inputs: torch.zeros(len(inputs.rows), dtype=torch.bool)

        def rows(call: AffineCall, shape: torch.Size, inputs: LayerInputs) -> Tensor | None:
            if live is not None and layouts is not None:
                sample_index = layouts.sample_index(call, shape, inputs, size)
                if sample_index is not None:
                    return live[sample_index.to(live.device)]
            self.unknown.add(call.name)
            return None

        return rows
