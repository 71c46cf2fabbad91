"""One pass that records what it drew and measured, and passes over the doubled batch that repeat it.

The search must see one fixed function: the dropout masks, random numbers and batch statistics of the clean pass, the
same for every step and for both halves of the doubled batch. Setting the random state back would not do: the same
state gives other masks for a batch of another size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from excite._core.background import runs_ahead
from excite._core.calls import Batch, tensors
from excite._core.intercept.affine import AffineCall, AffineMode, Names
from excite._core.layout import Layout, fitting_layouts
from excite._core.preserve import RandomState
from excite.errors import InputError, ModelError

_RANDOM_NAMES = (
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "normal", "poisson", "randperm",
    "multinomial", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_",
)  # fmt: skip
_RANDOM: set[Callable[..., Any]] = {
    getattr(namespace, name) for name in _RANDOM_NAMES for namespace in (torch, Tensor) if hasattr(namespace, name)
}
# Each multiplies its input by a random mask; the alpha variants also add one.
_DROPOUTS: set[Callable[..., Any]] = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.dropout,
    torch.feature_dropout,
}
_ALPHA_DROPOUTS: set[Callable[..., Any]] = {F.alpha_dropout, F.feature_alpha_dropout}
_OFF_BY_DEFAULT = _ALPHA_DROPOUTS | {F.rrelu}


class Tape:
    """What the clean pass drew and measured, in order, and where the halves lie at each site of the model."""

    def __init__(self, batch: int):
        self.batch = batch
        self.entries: list[Any] = []
        self.sites: list[Tensor] = []  # the clean tensor at every site, dropped once the layouts are known
        self.shapes: list[tuple[str, torch.Size]] = []
        self.layouts: list[Layout | None] = []
        self.random = False
        self.after: RandomState | None = None  # the random state when the clean pass had ended

    def rewind(self) -> None:
        """Doubled passes draw numbers that nobody keeps: the random state is that after one ordinary forward."""
        if self.after is not None:
            self.after.restore()


class Pass(AffineMode):
    """A forward pass that records to (`record`) or repeats from a tape.

    `live_norm`: batch normalization works as in an ordinary forward (the loss pass) instead of with clean statistics.
    `calibrate`: find the layouts by comparing with the clean tensors.
    `copies`: how often the batch stands in a row, 2 for the doubled batch.
    """

    def __init__(
        self,
        names: Names,
        tape: Tape,
        *,
        record: bool = False,
        live_norm: bool = False,
        calibrate: bool = False,
        copies: int = 2,
    ):
        super().__init__(names)
        self.copies = copies
        self.tape, self.record, self.live_norm, self.calibrate = tape, record, live_norm, calibrate
        self._entry = self._site = 0
        self._grad = torch.is_grad_enabled()
        self.fitting: list[list[Layout]] = []  # of a calibration, by site

    # -- sites ---------------------------------------------------------------------------------------------------
    def site(self, tensor: Tensor, what: str) -> Layout | None:
        """Register a tensor of the model; in a doubled pass, say how the halves lie in it (None: shared by all)."""
        tape, at = self.tape, self._site
        self._site += 1
        if self.record:
            tape.shapes.append((what, tensor.shape))
            tape.sites.append(tensor.detach())
            return Layout()
        if at >= len(tape.shapes) or tape.shapes[at][0] != what:
            raise another_path(f"it came to {what}")
        if self.calibrate:
            # Where a mask may have been laid out wrongly, what comes of it need not fit.
            strict = all(len(layouts) <= 1 for layouts in self.fitting)
            self.fitting.append(fitting_layouts(tape.sites[at], tensor, tape.batch, what, strict=strict))
            return self.layouts[-1]
        layout, expected = tape.layouts[at], list(tape.shapes[at][1])
        if layout is not None:
            expected[layout.axis] *= self.copies
        if list(tensor.shape) != expected:
            raise another_path(f"{what} got shape {tuple(tensor.shape)}, expected {tuple(expected)}")
        return layout

    def finish(self) -> None:
        """Called after a pass: one that repeats a tape must have met all that the clean pass met."""
        if not self.record and (self._site, self._entry) != (len(self.tape.shapes), len(self.tape.entries)):
            raise another_path("it left out some of its calls")

    @property
    def layouts(self) -> list[Layout | None]:
        """What a calibration found: None where all samples share a tensor, the best where several fit."""
        return [fitting[0] if fitting else None for fitting in self.fitting]

    # -- the tape ------------------------------------------------------------------------------------------------
    def _record_entry(self, entry: Any) -> Any:
        self.tape.entries.append(entry)
        return entry

    def _next(self, what: str) -> Any:
        if self._entry >= len(self.tape.entries):
            raise another_path(f"{what} drew other random numbers")
        self._entry += 1
        return self.tape.entries[self._entry - 1]

    def _mask(self, tensor: Tensor, what: str, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """A random tensor of the shape of `tensor`: drawn in the clean pass, laid out for both halves afterwards."""
        layout = self.site(tensor, what)
        if self.record:
            self.tape.random = True
            return self._record_entry(draw(tensor).detach())  # type: ignore[no-any-return]
        mask = self._next(what)
        return mask if layout is None or self.copies == 1 else layout.join(mask, mask)

    # -- functions -----------------------------------------------------------------------------------------------
    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = torch.get_rng_state()
        result = function(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            raise ModelError(
                f"the dropout inside {function.__name__} cannot be repeated on the doubled batch: "
                "set it to 0, or use nn.Dropout between recurrent layers"
            )
        return result

    def dropout(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "p", "train" if function in (torch.dropout, torch.feature_dropout) else "training")
        arguments = {**dict(zip(names, args)), **kwargs}
        x, p, on = arguments["input"], arguments.get("p", 0.5), arguments.get(names[2], function not in _OFF_BY_DEFAULT)
        if not on or p == 0:
            return function(*args, **kwargs)
        what = function.__name__

        def draw(value: float) -> Callable[[Tensor], Tensor]:
            return lambda t: function(torch.full_like(t, value), p, True)

        if function in _DROPOUTS:
            return x * self._mask(x, what, draw(1.0))
        # The alpha variants are x ↦ scale·x + shift with random scale and shift: read both off, from one draw.
        state = torch.get_rng_state() if self.record and x.device.type == "cpu" else None
        shift = self._mask(x, what, draw(0.0))
        if state is not None:
            torch.set_rng_state(state)
        elif self.record:
            raise ModelError(
                f"{what} cannot be replayed on {x.device}: use F.dropout, or put the model into evaluation mode"
            )
        scale = self._mask(x, what, lambda t: function(torch.ones_like(t), p, True) - shift)
        return x * scale + shift

    def rrelu(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = {**dict(zip(("input", "lower", "upper", "training"), args)), **kwargs}
        x, lower, upper = arguments["input"], arguments.get("lower", 1 / 8), arguments.get("upper", 1 / 3)
        if not arguments.get("training", False):
            return function(*args, **kwargs)

        def draw(t: Tensor) -> Tensor:  # slopes are drawn for negative entries only; elsewhere take their mean
            return torch.where(t < 0, function(t.detach(), lower, upper, True) / t, (lower + upper) / 2)

        slope = self._mask(x, "rrelu", draw)
        return torch.where(x < 0, x * slope, x)

    def attention(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        arguments = {**dict(zip(names, args)), **kwargs}
        p = arguments.get("dropout_p", 0.0)
        if not p:
            return function(*args, **kwargs)
        query, key, value, mask = arguments["query"], arguments["key"], arguments["value"], arguments.get("attn_mask")
        if arguments.get("enable_gqa"):
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
        scale = arguments.get("scale") or query.shape[-1] ** -0.5
        scores = query @ key.transpose(-2, -1) * scale
        if arguments.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1)
        drawn = self._mask(weights, "attention dropout", lambda t: F.dropout(torch.ones_like(t), p, True))
        return (weights * drawn) @ value

    def batch_norm(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names: tuple[str, ...] = (
            "input",
            "running_mean",
            "running_var",
            "weight",
            "bias",
            "training",
            "momentum",
            "eps",
        )
        if function is torch.batch_norm:
            names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        arguments = {**dict(zip(names, args)), **kwargs}
        if not arguments.get("training", False) or self.live_norm:
            if arguments.get("training", False):
                self._next("batch_norm")
            return function(*args, **kwargs)
        x = arguments["input"]
        if self.record:
            dims = [d for d in range(x.dim()) if d != 1]
            if x.numel() <= x.shape[1]:
                raise InputError(
                    "batch normalization in training mode needs more than one value per channel: give larger batches"
                )
            self._record_entry(_statistics(x.detach(), dims))
            mean, variance = self.tape.entries[-1]
        else:
            mean, variance = self._next("batch_norm")
        affine = arguments.get("weight"), arguments.get("bias")
        return _FixedNorm.apply(x, mean, variance, *affine, arguments.get("eps", 1e-5))  # type: ignore[no-untyped-call]

    def instance_norm(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats")
        arguments = {**dict(zip(names, args)), **kwargs}
        if self.live_norm or not arguments.get("use_input_stats", True):
            return function(*args, **kwargs)
        # Statistics are per sample: only the update of the running ones has to be kept out.
        affine = {k: arguments[k] for k in ("weight", "bias", "eps") if k in arguments}
        if len(args) > 7:
            affine["eps"] = args[7]
        return F.instance_norm(arguments["input"], None, None, use_input_stats=True, **affine)

    def draw(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        drawn = function(*args, **kwargs)
        if not isinstance(drawn, Tensor):
            return drawn
        what = function.__name__
        if self.record:
            self.tape.random = True
            self._record_entry(drawn.detach().clone())
            return drawn
        stored = self._next(what)
        if not isinstance(stored, Tensor):  # the statistics of a normalization
            raise another_path(f"{what} drew other random numbers")
        if drawn.shape != stored.shape:
            stored = find_layout_by_shape(stored.shape, drawn.shape, self.tape.batch, what).join(stored, stored)
        # In-place functions must fill the tensor they were given.
        return drawn.copy_(stored) if what.endswith("_") else stored

    replacements: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {
        **dict.fromkeys(_RANDOM, draw),
        **dict.fromkeys(_DROPOUTS | _ALPHA_DROPOUTS, dropout),
        F.rrelu: rrelu,
        F.scaled_dot_product_attention: attention,
        F.batch_norm: batch_norm,
        torch.batch_norm: batch_norm,
        F.instance_norm: instance_norm,
    }

    # -- affine calls --------------------------------------------------------------------------------------------
    def visit(self, call: AffineCall) -> Tensor:
        if self._grad:
            _refuse_checkpointing(call.name)
        return self.affine(call)

    def affine(self, call: AffineCall) -> Tensor:
        return call.run(self.at_signal(call.name, call.input))

    def at_signal(self, name: str, signal: Tensor) -> Tensor:
        """What the model continues with at a site: the input of an affine call, or the output of a module of `names.outputs`."""
        return signal

    # -- outputs of modules --------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        """Starts the pass, with hooks on the modules whose outputs are sites for as long as it lasts."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks = [
            module.register_forward_hook(self._output_hook(name)) for name, module in self.names.outputs.items()
        ]
        return self

    def __exit__(self, *failure: Any) -> None:
        """Ends the pass and removes its hooks."""
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def _output_hook(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def replaced(module: nn.Module, args: Any, output: Any) -> Any:
            if self._grad:
                _refuse_checkpointing(name)
            self._count[name] = count = self._count.get(name, 0) + 1
            with torch._C.DisableTorchFunction():
                return map_signal(output, name, partial(self.at_signal, name if count == 1 else f"{name}#{count}"))

        return replaced


class CleanPass(Pass):
    """Records, and hands out an alias of every chosen input: its gradient is that of the perturbation at zero.

    `x` is what enters the model. `chosen`: whether a layer of this name is perturbed; with `skip_input` not if its input is x, or one of
    several tensors in it.
    `bounded`: find out which of the chosen inputs are x, since bounds on x hold there.
    """

    def __init__(
        self,
        names: Names,
        tape: Tape,
        x: Batch,
        chosen: Callable[[str], bool],
        *,
        skip_input: bool = False,
        bounded: bool = False,
    ):
        super().__init__(names, tape, record=True)
        self._x, self._chosen, self._skip_input, self._bounded = x, chosen, skip_input, bounded
        self.names_called: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.site_number: dict[str, int] = {}
        self.on_x: dict[str, Tensor | None] = {}  # layers on the model's own input; a tensor says whether they are

    def affine(self, call: AffineCall) -> Tensor:
        """Runs an affine call; the input of a chosen layer becomes a site of the search."""
        return call.run(self.at_signal(call.name, call.input), frozen=True)

    def at_signal(self, name: str, signal: Tensor) -> Tensor:
        """A chosen signal becomes a site of the search."""
        self.names_called.append(name)
        chosen = self._chosen(name) and not (
            self._skip_input and any(shares_memory(signal, x) for x in tensors(self._x))
        )
        # Where gradients are off (a frozen backbone under no_grad) there is nothing to search.
        if not (chosen and signal.is_floating_point() and torch.is_grad_enabled()):
            return signal
        self.site_number[name] = len(self.tape.shapes)
        self.site(signal, name)
        if self._bounded:
            self._compare_with_x(name, signal)
        # A node of its own, because other users of this signal (a skip connection) must not be counted.
        self.inputs[name] = signal.view_as(signal) if signal.requires_grad else signal.detach().requires_grad_()
        return self.inputs[name]

    def _compare_with_x(self, layer: str, input: Tensor) -> None:
        """Records whether this layer reads the model's own input, without waiting for a GPU."""
        first = tensors(self._x)[0]
        comparable = input.dtype == first.dtype and input.numel() == first.numel()
        # Bounds that are tensors need the batch in front, which can only be refused once it is known to be the input.
        if (
            comparable
            and runs_ahead(input)
            and input.shape[:1] == first.shape[:1]
            and not shares_memory(input, self._x)
        ):
            self.on_x[layer] = (input.detach().reshape(-1) == first.detach().reshape(-1)).all()
        elif is_model_input(input, self._x):
            self.on_x[layer] = None


class PerturbedPass(Pass):
    """Repeats a tape with the inputs of some calls moved.

    `registered`: calls whose inputs are sites of the tape. `moves`: what to do with the input of a registered call, by name.
    `frozen`: no gradients for weights and biases.
    """

    def __init__(
        self,
        names: Names,
        tape: Tape,
        registered: frozenset[str],
        moves: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        *,
        frozen: bool = False,
        live_norm: bool = False,
        calibrate: bool = False,
        copies: int = 2,
    ):
        super().__init__(names, tape, live_norm=live_norm, calibrate=calibrate, copies=copies)
        self._registered, self._moves, self._frozen = registered, moves or {}, frozen

    def affine(self, call: AffineCall) -> Tensor:
        return call.run(self.at_signal(call.name, call.input), frozen=self._frozen)

    def at_signal(self, name: str, signal: Tensor) -> Tensor:
        if name in self._registered:
            self.site(signal, name)
            if name in self._moves:
                return self._moves[name](signal)
        return signal


class _FixedNorm(torch.autograd.Function):
    """Batch normalization with given statistics, whose gradient is for its input only: a product per channel.

    The search needs no other gradient, and torch's own backward of this case is slow where channels come last.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(scale if weight is None else scale * weight)
        # The statistics are at least in float32, and the weights of a model in half precision have to agree with them.
        weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        shape = [-1 if axis == 1 else 1 for axis in range(gradient.dim())]
        return gradient * scale.to(gradient.dtype).reshape(shape), None, None, None, None, None


def _statistics(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance (without correction) over `dims`, in at least float32."""
    if x.is_cuda:  # the kernel of batch normalization itself: four times faster on half precision, no wide copy
        mean, inverse = torch.batch_norm_stats(x, 0.0)  # 1/σ, and 0 where σ is 0
        return mean, torch.where(inverse > 0, inverse.square().reciprocal(), 0)
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), dims, correction=0)
    return mean, variance


def is_model_input(input: Tensor, x: Batch) -> bool:
    """Whether a layer's input is the model's own input, perhaps flattened or copied: bounds on x hold there too."""
    first = tensors(x)[0]
    if input.dtype != first.dtype or input.numel() != first.numel():
        return False
    return shares_memory(input, x) or bool(torch.equal(input.detach().reshape(-1), first.detach().reshape(-1)))


def shares_memory(input: Tensor, x: Batch) -> bool:
    """Whether a layer's input is the model's own input or a view of all of it."""
    first = tensors(x)[0]
    same = input.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    return same and input.numel() == first.numel()


def map_signal(output: Any, name: str, function: Callable[[Tensor], Tensor]) -> Any:
    """What a module returned, with `function` applied to its signal: the tensor itself, or the first of a tuple or list."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return function(output)
    if isinstance(output, tuple | list) and output and not hasattr(output, "_fields"):
        return type(output)([map_signal(output[0], name, function), *output[1:]])
    raise ModelError(
        f"{name}: expected a module that returns a tensor of floating-point numbers, or a tuple that begins with one; it returned "
        f"{type(output).__name__}"
    )


def another_path(reason: str) -> ModelError:
    """The error for a model that takes another path on the doubled batch."""
    return ModelError(
        f"the model takes another path on the doubled batch ({reason}): its branches must not depend on chance or on the batch"
    )


def find_layout_by_shape(clean: torch.Size, doubled: torch.Size, batch: int, what: str) -> Layout:
    """Finds the batch axis of random numbers from their shapes for the batch and for the doubled batch."""
    axes = [a for a, n in enumerate(clean) if len(doubled) == len(clean) and doubled[a] == 2 * n]
    if len(axes) != 1 or clean[axes[0]] != batch:
        raise ModelError(
            f"random numbers of shape {tuple(clean)} drawn by {what} cannot be repeated for the doubled batch"
        )
    return Layout(axes[0])


def _refuse_checkpointing(layer: str) -> None:
    # Recomputation happens in the backward pass, where perturbations are no longer applied: wrong gradients in silence.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inside = hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook")
    if not inside and not torch.is_grad_enabled():
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not inside:
            inside = frame.f_code is CheckpointFunction.forward.__code__
            frame = frame.f_back
    if inside:
        raise ModelError(
            f"layer {layer!r} runs under activation checkpointing, which recomputes it without the perturbations: "
            "switch checkpointing off for training with excitation"
        )
