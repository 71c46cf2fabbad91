"""Linear layers whose weights are cast to autocast's dtype together, for passes without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.preserve import device_of
from excite._core.wrappers import is_sharded

_ALIGNED = 256  # numbers


@contextmanager
def cast_linears(model: nn.Module) -> Iterator[None]:
    """Under autocast, casts the weights and biases of all `nn.Linear` by one kernel instead of one each when they are called.

    The numbers are the same. In a forward pass of a transformer without compilation a third of the kernels are such casts, and
    between small kernels a GPU waits for the host. Outside autocast, with gradients and for sharded models nothing is changed.

    Args:
        model: The model; its layers have their own `forward` again at the end.
    """
    device, layers = device_of(model), list[nn.Linear]()
    if not torch.is_grad_enabled() and _autocast_enabled(device.type) and not is_sharded(model):
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and _is_plain(layer, device)]
    try:
        if layers:
            own = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
            cast = _copies(own, torch.get_autocast_dtype(device.type))
            torch._foreach_copy_(cast, own)
            remaining = iter(cast)
        for layer in layers:
            weight = next(remaining)
            layer.__dict__["forward"] = _forward(layer, weight, None if layer.bias is None else next(remaining))
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _autocast_enabled(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _is_plain(layer: nn.Linear, device: torch.device) -> bool:
    """Whether this is an `nn.Linear` as PyTorch has it, with weights of its own in float32."""
    parameters = [p for p in layer._parameters.values() if p is not None]
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and not layer._forward_pre_hooks  # may change weights
        and layer._parameters.get("weight") is not None
        and all(type(p) in (Tensor, nn.Parameter) and p.dtype == torch.float32 for p in parameters)
        and all(p.device == device and p.is_contiguous() for p in parameters)
    )


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes in one block of memory, aligned as by the allocator of a GPU: the same kernels are chosen."""
    *starts, end = accumulate((-(-t.numel() // _ALIGNED) * _ALIGNED for t in tensors), initial=0)
    block = torch.empty(end, dtype=dtype, device=tensors[0].device)
    return [block.as_strided(t.shape, t.stride(), start) for t, start in zip(tensors, starts)]


def _forward(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    device, dtype = weight.device.type, weight.dtype

    def forward(input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype:
            return F.linear(input, weight, bias)
        return F.linear(input, layer.weight, layer.bias)  # autocast is off around this layer

    return forward
