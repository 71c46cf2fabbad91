"""Which functions of torch are layers, products, constants and rearrangements: the tables that `affine` goes by."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS: dict[Callable[..., Any], str] = {
    F.linear: "linear",
    torch.conv1d: "conv",
    torch.conv2d: "conv",
    torch.conv3d: "conv",
    torch.conv_transpose1d: "conv",
    torch.conv_transpose2d: "conv",
    torch.conv_transpose3d: "conv",
}
# Recurrent kernels hold their affine maps inside one call: they can be listed, not perturbed.
OPAQUE: tuple[Callable[..., Any], ...] = (
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
    torch.lstm_cell,
    torch.gru_cell,
    torch.rnn_tanh_cell,
    torch.rnn_relu_cell,
)
# Functions of numbers alone whose result is a constant. Random ones are not among them: what they draw is a signal.
FACTORIES = {
    "zeros", "ones", "empty", "full", "arange", "range", "linspace", "logspace", "eye", "tensor", "scalar_tensor",
    "tril_indices", "triu_indices", "hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window",
}  # fmt: skip
# Those among them, with `new_zeros` and the like, whose entries are equal: an initial state is made with these, or is a
# parameter that is repeated for every sample. Multiplied by a weight it is an input, as with F.linear; any other constant
# (eye, arange, a buffer) times a weight is a weight.
FILLED = {"zeros", "ones", "empty", "full"}
UNEQUAL = {"tril", "triu", "diag", "diag_embed", "diagonal_scatter", "one_hot", "cumsum"}
RANDOM = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
SUMS = {"add", "radd", "sub", "rsub", "subtract"}


def without_override(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function of torch whose inner calls reach a TorchFunctionMode.

    Such a function hands itself to the mode as one call, which hides the linear maps and the random numbers inside. The same
    code with its own check off runs openly.
    """
    opened = types.FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


OPENED = {f: without_override(f) for f in (F.multi_head_attention_forward, F.gumbel_softmax)}


IN_PLACE = {
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


def methods(*names: str) -> list[Callable[..., Any]]:
    """The functions of torch and the methods of Tensor with these names."""
    return [getattr(namespace, name) for name in names for namespace in (torch, Tensor) if hasattr(namespace, name)]


SHAPED = set(methods("reshape", "view", "view_as", "reshape_as"))
CASTS = set(methods("to", "type_as"))
SHALLOW = {*SHAPED, *CASTS, Tensor.expand_as}
MOVING = {
    *SHAPED,
    *CASTS,
    *methods(
        "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim", "moveaxis", "swapaxes", "swapdims",
        "contiguous", "clone", "t", "float", "double", "half", "bfloat16",
    ),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
}  # fmt: skip
REPEATING = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
REARRANGING = MOVING | set(methods(*REPEATING))
LIKE = methods(
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"
)
DIVISIONS = {*methods("div", "divide", "true_divide", "div_", "divide_", "true_divide_"), Tensor.__itruediv__}
SCALINGS_IN_PLACE = {
    *methods("mul_", "multiply_", "div_", "divide_", "true_divide_"), Tensor.__imul__, Tensor.__itruediv__,
}  # fmt: skip
