"""See every affine call of a model while it runs, and change what goes into it.

A `TorchFunctionMode` meets every call of `F.linear`, convolutions and products with a parameter, whoever makes it: a
module, a bare functional call, an attention layer. Module hooks would miss the last two.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# function -> (kind, position of the input, position of the weight, position of the bias)
_LAYERS: dict[Callable[..., Any], tuple[str, int, int, int]] = {
    F.linear: ("linear", 0, 1, 2),
    torch.conv1d: ("conv", 0, 1, 2),
    torch.conv2d: ("conv", 0, 1, 2),
    torch.conv3d: ("conv", 0, 1, 2),
    torch.conv_transpose1d: ("conv", 0, 1, 2),
    torch.conv_transpose2d: ("conv", 0, 1, 2),
    torch.conv_transpose3d: ("conv", 0, 1, 2),
}
_Found = tuple[str, int | str, int | str, int | str | None]  # kind, and where input, weight and bias stand
_ARGUMENTS = ("input", "weight", "bias")
# Products count as affine calls only if exactly one factor is (a view of) a parameter: position of the two factors.
_PRODUCTS: dict[Callable[..., Any], tuple[int, int]] = {
    torch.matmul: (0, 1),
    torch.mm: (0, 1),
    torch.bmm: (0, 1),
    Tensor.matmul: (0, 1),
    Tensor.mm: (0, 1),
    Tensor.bmm: (0, 1),
    Tensor.__matmul__: (0, 1),
    Tensor.__rmatmul__: (0, 1),
    torch.addmm: (1, 2),
    Tensor.addmm: (1, 2),
    torch.einsum: (1, 2),
}
# Recurrent kernels hold their affine maps inside one call: they can be listed, not perturbed.
_OPAQUE = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}


@dataclass(frozen=True)
class AffineCall:
    """One affine call: which weight, at which position the input stands, and the arguments as they came."""

    name: str
    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input_at: int | str
    weight_at: int | str
    bias_at: int | str | None

    def _argument(self, at: int | str) -> Tensor:
        return self.kwargs[at] if isinstance(at, str) else self.args[at]  # type: ignore[no-any-return]

    @property
    def input(self) -> Tensor:
        return self._argument(self.input_at)

    @property
    def weight(self) -> Tensor:
        return self._argument(self.weight_at)

    @property
    def bias(self) -> Tensor | None:
        return None if self.bias_at is None else self._argument(self.bias_at)

    def run(self, input: Tensor, *, frozen: bool = False) -> Tensor:
        """The call with another input; `frozen` detaches weight and bias, so that no graph is kept for them."""
        changes: dict[int | str, Tensor] = {self.input_at: input}
        if frozen:
            changes[self.weight_at] = self.weight.detach()
            if self.bias is not None:
                changes[self.bias_at] = self.bias.detach()  # type: ignore[index]
        args = tuple(changes.get(i, a) for i, a in enumerate(self.args))
        kwargs = {k: changes.get(k, a) for k, a in self.kwargs.items()}
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]


class Names:
    """Names of affine calls: the weight's path without `.weight`; a second call of the same weight is `name#2`."""

    def __init__(self, model: nn.Module):
        self._by_id: dict[int, str] = {}
        self._by_storage: dict[int, str] = {}
        self._modules = {id(module): clean_path(path) for path, module in model.named_modules()}
        for path, parameter in model.named_parameters():
            self._by_id[id(parameter)] = clean_path(path)
            if parameter.numel() and not hasattr(parameter, "full_tensor"):  # a DTensor has no storage of its own
                self._by_storage.setdefault(parameter.untyped_storage().data_ptr(), clean_path(path))

    def parameter(self, tensor: Any) -> str | None:
        """The path of the parameter that `tensor` is, or is a view of."""
        if not isinstance(tensor, Tensor):
            return None
        if id(tensor) in self._by_id:
            return self._by_id[id(tensor)]
        if tensor._is_view() and tensor.numel():
            return self._by_storage.get(tensor.untyped_storage().data_ptr())
        return None

    def layer(self, weight: Tensor) -> str:
        path = self.parameter(weight)
        if path is not None:
            return path.removesuffix(".weight") if path != "weight" else "weight"
        # A weight computed on the fly (weight normalization, a hypernetwork): name the module that makes the call.
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._modules:
                return self._modules[id(owner)] or "weight"
            frame = frame.f_back
        return "weight"


def clean_path(path: str) -> str:
    """A path without the wrappers of torch.compile and data-parallel training."""
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module"))


def _open(function: Callable[..., Any]) -> Callable[..., Any]:
    # Such a function hands itself to the mode as one call, which hides the linear maps and the random numbers inside.
    # The same code with its own check off runs openly, and its inner calls reach the mode.
    opened = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


_OPENED = {f: _open(f) for f in (F.multi_head_attention_forward, F.gumbel_softmax)}


class AffineMode(TorchFunctionMode):
    """While active, `visit(call)` replaces every affine call of `model`; it returns the output of the call.

    Subclasses override `visit`, and `other` for every function that is not an affine call.
    One instance serves one forward pass: repeated calls of a weight are counted.
    """

    def __init__(self, names: Names):
        super().__init__()
        self.names = names
        self._count: dict[str, int] = {}

    def visit(self, call: AffineCall) -> Tensor:
        return call.run(call.input)

    def other(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for recurrent kernels, whose inner affine maps cannot be reached."""
        return function(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        call = self._recognise(func, args, kwargs)
        if call is not None:
            return self.visit(call)
        if getattr(func, "__name__", "") in _OPAQUE:
            return self.opaque(func, args, kwargs)
        return self.other(func, args, kwargs)

    def _recognise(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> AffineCall | None:
        found = None
        if func in _LAYERS:
            found = _find_layer(_LAYERS[func], args, kwargs)
        elif func in _PRODUCTS:
            found = self._find_product(func, _PRODUCTS[func], args)
        if found is None:
            return None
        kind, input_at, weight_at, bias_at = found
        weight = args[weight_at] if isinstance(weight_at, int) else kwargs[weight_at]
        name = self.names.layer(weight)
        self._count[name] = count = self._count.get(name, 0) + 1
        if count > 1:
            name = f"{name}#{count}"
        return AffineCall(name, kind, func, args, kwargs, input_at, weight_at, bias_at)

    def _find_product(self, func: Callable[..., Any], places: tuple[int, int], args: tuple[Any, ...]) -> _Found | None:
        if len(args) != max(places) + 1 or not all(isinstance(args[p], Tensor) for p in places):
            return None  # keyword operands or an einsum of another arity: not recognised
        left, right = (self.names.parameter(args[p]) is not None and args[p].dim() > 1 for p in places)
        if left == right:
            return None
        weight_at, input_at = places if left else places[::-1]
        return "linear", input_at, weight_at, 0 if func in (torch.addmm, Tensor.addmm) else None


def _find_layer(layer: tuple[str, int, int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found | None:
    kind, *places = layer
    where: list[int | str | None] = []
    for name, place in zip(_ARGUMENTS, places):
        value = args[place] if place < len(args) else kwargs.get(name)
        where.append(None if not isinstance(value, Tensor) else place if place < len(args) else name)
    input_at, weight_at, bias_at = where
    return None if input_at is None or weight_at is None else (kind, input_at, weight_at, bias_at)
