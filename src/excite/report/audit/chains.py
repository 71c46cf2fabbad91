"""Weights of a model that is a chain of linear layers with nothing between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite._core.intercept.affine import Names
from excite._core.preserve import eval_mode
from excite._core.wrappers import eagerly, unwrap
from excite.bounds.relu_network import FAR, LayerRecorder, need_real
from excite.errors import ModelError

Pairs = list[tuple[Tensor, Tensor | None]]


def linear_chain(model: nn.Module, x: Tensor) -> Pairs:
    """Layers of a model x ↦ W_L (… W_1 x + b_1 …) + b_L.

    Args:
        model: Any module; anything but such a chain is refused.
        x: Points (N, ...) on which the chain is verified.

    Returns:
        (weight (out, in), bias or None) per layer, in float64.

    Raises:
        ModelError: If the model is anything else.
    """
    model = unwrap(model)
    need_real(x)
    recorder = LayerRecorder(Names(model))
    x = torch.cat([x, FAR * x, -FAR * x])
    with eval_mode(model), eagerly(model), torch.no_grad(), recorder:
        returned = pick_output(model(x.clone()))
    flowing = x.flatten(1)
    pairs: Pairs = []
    for call, entered, output in recorder.calls:
        matrix = call.matrix(entered.dim())
        if matrix is None or entered.dim() != 2:
            raise ModelError(f"expected linear layers only; layer {call.name} is not one")
        if entered.shape != flowing.shape or not torch.equal(entered, flowing):
            raise ModelError(
                f"expected linear layers and nothing between them; the input of layer {call.name} is not the previous layer's output"
            )
        pairs.append((matrix.detach().double(), None if call.bias is None else call.bias.detach().double()))
        flowing = output
    if not pairs or not torch.equal(returned.reshape(len(x), -1), flowing):
        raise ModelError("expected linear layers and nothing after them")
    return pairs
