"""Which linear piece of a piecewise-linear model each point is on: one number a point.

All operations of a forward pass are looked at. The side of its kink that every element is on, the element that every
maximum takes and the outcome of every comparison are hashed into 64 bits a point: two points with the same number are
on the same side of everything (but for a chance of 2⁻⁶⁴). Points between them then are, too, because everything before
the first kink is linear, and so on from kink to kink: the model is linear on the segment from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from excite.errors import InputError, ModelError
from excite.wiring.calling import Pick, check_finite, pick_output
from excite.wiring.untouched import evaluating
from excite.wiring.wrappers import eagerly, unwrap

_AT_ONCE = 2**20  # numbers of the inputs in one forward pass
_MOST_POINTS = 4096

# Elementwise operations, and where their kinks are, from the arguments after the first.
_AT_ZERO = ("relu", "leaky_relu", "prelu", "_prelu_kernel", "rrelu_with_noise", "abs", "sign", "sgn")
_KINKS: dict[str, Callable[..., tuple[Any, ...]]] = {
    **{name: lambda *a, **k: (0.0,) for name in _AT_ZERO},
    "hardtanh": lambda low=-1.0, high=1.0: (low, high),
    "relu6": lambda: (0.0, 6.0),
    "hardsigmoid": lambda: (-3.0, 3.0),
    "threshold": lambda at, value: (at,),
    "clamp": lambda min=None, max=None: (min, max),
    "clip": lambda min=None, max=None: (min, max),
    "clamp_min": lambda min: (min,),
    "clamp_max": lambda max: (max,),
    "hardshrink": lambda lambd=0.5: (-lambd, lambd),
    "softshrink": lambda lambd=0.5: (-lambd, lambd),
}
_PAIRS = ("maximum", "minimum", "fmax", "fmin")
_EXTREMES = ("amax", "amin")
_PRODUCTS = ("mul", "mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm", "convolution", "linear", "dot", "mv", "addmv")
_SMOOTH = (
    "sigmoid", "tanh", "gelu", "silu", "mish", "softplus", "elu", "celu", "selu", "hardswish", "log_sigmoid_forward",
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "square", "reciprocal", "sin", "cos", "tan",
    "atan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "logsumexp", "_softmax",
    "_log_softmax", "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
    "cudnn_batch_norm", "linalg_vector_norm", "norm", "cumprod", "prod", "_fused_rms_norm", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention", "_transformer_encoder_layer_fwd",
    "_native_multi_head_attention",
)  # fmt: skip


def signatures(model: nn.Module, x: Tensor, *, output: Pick = None) -> tuple[Tensor, Tensor]:
    """The linear piece that each point of x (B, ...) is on, as a number (B,), and the outputs (B, m).

    The model runs in evaluation mode and is left as it was. Refused where it is not piecewise linear.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
        what = f"a tensor of {x.dtype}, {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"expected floating-point inputs with a batch axis in front; got {what}")
    check_finite(x)
    model = unwrap(model)
    size = max(1, min(_MOST_POINTS, _AT_ONCE // max(1, x[:1].numel())))
    found, outputs = [], []
    with evaluating(model), eagerly(model), torch.no_grad():
        if len(x) > 1 and not _in_front(model, x[:1].detach()):
            size = 1
        for part in x.detach().split(size) if len(x) else [x.detach()]:
            watching = _Watching(part.clone())
            with watching:
                returned = pick_output(model(watching.entered), output)
            found.append(watching.hashed)
            outputs.append(returned.flatten(1) if returned.dim() > 1 else returned[:, None])
    return torch.cat(found), torch.cat(outputs)


def _in_front(model: nn.Module, x: Tensor) -> bool:
    """Whether samples come one after the other along the first axis of everything that is hashed; x (1, ...).

    Time folded into the batch step by step, (T·B, D), has the same shapes as sample by sample. A sample of NaN shows where
    it lies.
    """
    watching = _Watching(torch.cat([torch.full_like(x, torch.nan), x]))
    try:
        with watching:
            model(watching.entered)
    except ModelError:  # the same for one sample at a time, if it is not about the order
        return False
    return not watching.mixed


class _Watching(TorchDispatchMode):
    """Follows what depends on the input, operation by operation."""

    def __init__(self, entered: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.entered = entered
        self.hashed = torch.zeros(len(entered), dtype=torch.int64, device=entered.device)
        self._moving = {id(entered): entered}  # kept alive, so that no other tensor gets the same id
        self._count = 0
        self.mixed = False  # whether NaN of the first half of the batch came to the second half of something hashed
        self._read: list[Tensor] = []  # what the current operation reads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saying "skip" imports the compiler first, which takes seconds; everything here runs eagerly

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        plain = name.rstrip("_") if not name.startswith("_") else name
        if not any(id(leaf) in self._moving for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        self._refuse(plain, args)
        leaves = tree_leaves((args, kwargs))
        self._read = [leaf for leaf in leaves if id(leaf) in self._moving and leaf.is_floating_point()]
        if plain in _KINKS:
            for at in _KINKS[plain](*(() if plain in _AT_ZERO else args[1:]), **({} if plain in _AT_ZERO else kwargs)):
                if at is not None:
                    self._hash(args[0] > at)
        elif plain in _PAIRS:
            self._hash(args[0] > args[1])
        elif plain in _EXTREMES:
            raise ModelError(
                f"cannot tell linear pieces apart through {plain}: use torch.max or torch.min along one axis"
            )
        elif plain == "max_pool1d":  # without gradients it does not say which element it took
            self._hash(torch.ops.aten.max_pool1d_with_indices(*args, **kwargs)[1])
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._moving[id(leaf)] = leaf
                if not leaf.is_floating_point():  # outcomes of comparisons, places of maxima
                    self._hash(leaf)
        return result

    def _refuse(self, name: str, args: tuple[Any, ...]) -> None:
        if "batch_norm" in name and args[5] is False:  # running statistics: an affine map
            return
        if name in _SMOOTH:
            raise ModelError(
                f"expected a piecewise-linear model; {name.strip('_')} is not: ask for its output before that, or use "
                "excite.lipschitz.local, which needs no linear regions"
            )
        factors = args[1:3] if name in ("addmm", "baddbmm", "addbmm", "addmv") else args[:2]
        if name in _PRODUCTS and sum(id(factor) in self._moving for factor in factors) > 1:
            raise ModelError(f"expected a piecewise-linear model; {name} multiplies two signals with each other")
        if name == "div" and isinstance(args[1], Tensor) and id(args[1]) in self._moving:
            raise ModelError("expected a piecewise-linear model; it divides by something that depends on the input")

    def _hash(self, bits: Tensor) -> None:
        """Add one random 64-bit number for every element, times what it is; sums wrap around."""
        batch = len(self.hashed)
        if not batch or not bits.numel():
            return
        if bits.dim() == 0 or bits.shape[0] % batch:
            raise ModelError(
                f"cannot tell samples apart: expected {batch} along the first axis of every activation; got {tuple(bits.shape)}"
            )
        if batch == 2:
            self.mixed |= any(bool(t.reshape(2, -1)[1].isnan().any()) for t in self._read if t.numel() % 2 == 0)
        flat = bits.reshape(batch, -1).long()
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        numbers = torch.randint(-(2**63), 2**63 - 1, (flat.shape[1],), generator=generator)
        self.hashed += (flat * numbers.to(flat.device)).sum(1)
