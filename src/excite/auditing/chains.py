"""A model that is a chain of linear layers with nothing between them, as its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.wiring.affine import AffineCall, AffineMode, Names
from excite.wiring.calling import pick_output
from excite.wiring.untouched import evaluating
from excite.wiring.wrappers import eagerly, unwrap

Pairs = list[tuple[Tensor, Tensor | None]]
_FAR = 1e4  # points are also tried this many times farther out, on both sides: a ReLU that never acts on x shows there


class _Recorder(AffineMode):
    def __init__(self, names: Names):
        super().__init__(names)
        self.seen: list[tuple[AffineCall, Tensor, Tensor]] = []

    def visit(self, call: AffineCall) -> Tensor:
        entered = call.input.clone()
        output = super().visit(call)
        self.seen.append((call, entered, output.clone()))
        return output


def linear_chain(model: nn.Module, x: Tensor) -> Pairs:
    """(weight (out, in), bias or None) of x ↦ W_L (… W_1 x + b_1 …) + b_L in float64; any other model is refused."""
    model = unwrap(model)
    recorder = _Recorder(Names(model))
    x = torch.cat([x, _FAR * x, -_FAR * x])
    with evaluating(model), eagerly(model), torch.no_grad(), recorder:
        returned = pick_output(model(x.clone()))
    flowing = x.flatten(1)
    pairs: Pairs = []
    for call, entered, output in recorder.seen:
        if getattr(call.function, "__name__", "") != "linear" or entered.dim() != 2:
            raise ModelError(f"expected linear layers only; layer {call.name} is not one")
        if entered.shape != flowing.shape or not torch.equal(entered, flowing):
            raise ModelError(
                f"expected linear layers and nothing between them; something happens before layer {call.name}"
            )
        pairs.append((call.weight.detach().double(), None if call.bias is None else call.bias.detach().double()))
        flowing = output
    if not pairs or not torch.equal(returned.reshape(len(x), -1), flowing):
        raise ModelError("expected linear layers and nothing after them")
    return pairs
