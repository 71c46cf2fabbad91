"""Linear layers whose weights are cast to autocast's dtype together, for passes without gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.preserve import device_of, modules_of
from excite._core.wrappers import is_sharded

_ALIGNED = 256  # numbers
_RESIZABLE = ("cpu", "cuda")  # devices on which the memory of a storage can be given back and taken again


@contextmanager
def cast_linears(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Under autocast, casts the weights and biases of all `nn.Linear` by one kernel instead of one each when they are called.

    The numbers are the same. In a forward pass of a transformer without compilation a third of the kernels are such casts, and
    between small kernels a GPU waits for the host. Outside autocast, with gradients and for sharded models nothing is changed.

    Args:
        model: The model; its layers have their own `forward` again at the end.

    Yields:
        A function that casts again: to be called where the model has got other weights.
    """
    device, layers = device_of(model), list[nn.Linear]()
    if not torch.is_grad_enabled() and _autocast_enabled(device.type) and not is_sharded(model):
        layers = [layer for layer in modules_of(model) if isinstance(layer, nn.Linear) and _is_plain(layer, device)]
    if not layers:
        yield lambda: None
        return
    copies = _copies_of(model, _own(layers), torch.get_autocast_dtype(device.type))
    try:
        cast = copies.allocate()
        torch._foreach_copy_(cast, _own(layers))
        remaining = iter(cast)
        for layer in layers:
            weight = next(remaining)
            layer.__dict__["forward"] = _forward(layer, weight, None if layer.bias is None else next(remaining))
        yield lambda: torch._foreach_copy_(cast, _own(layers))
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
        copies.free()


def _own(layers: Sequence[nn.Linear]) -> list[Tensor]:
    """The weights and biases that the layers have now."""
    return [p for layer in layers for p in layer._parameters.values() if p is not None]


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


class _Copies:
    """Tensors in one block of memory, aligned as by the allocator of a GPU: the same kernels are chosen.

    The tensors are made once. Between `free` and `allocate` their block has no memory.
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype):
        *starts, end = accumulate((-(-t.numel() // _ALIGNED) * _ALIGNED for t in tensors), initial=0)
        block = torch.empty(end, dtype=dtype, device=tensors[0].device)
        self._storage, self._size = block.untyped_storage(), block.untyped_storage().nbytes()
        self._views = [block.as_strided(t.shape, t.stride(), start) for t, start in zip(tensors, starts)]
        self.used = False

    def allocate(self) -> list[Tensor]:
        """The tensors, with any values."""
        self.used = True
        if self._storage.nbytes() != self._size:
            self._storage.resize_(self._size)
        return self._views

    def free(self) -> None:
        """Gives the memory back."""
        if self._storage.device.type in _RESIZABLE:
            self._storage.resize_(0)
        self.used = False


_known: weakref.WeakKeyDictionary[nn.Module, tuple[object, _Copies]] = (
    weakref.WeakKeyDictionary()
)  # with what they are like


def _copies_of(model: nn.Module, tensors: Sequence[Tensor], dtype: torch.dtype) -> _Copies:
    """Copies for tensors of a model: those of the last pass, if the tensors are like those of then."""
    like = dtype, tensors[0].device, [(t.shape, t.stride()) for t in tensors]
    known = _known.get(model)
    if known is not None and known[0] == like and not known[1].used:
        return known[1]
    copies = _Copies(tensors, dtype)
    if tensors[0].device.type in _RESIZABLE:
        _known[model] = like, copies
    return copies


def _forward(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    device, dtype = weight.device.type, weight.dtype

    def forward(input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype:
            return F.linear(input, weight, bias)
        return F.linear(input, layer.weight, layer.bias)  # autocast is off around this layer

    return forward
