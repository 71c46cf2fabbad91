"""Checks of the training methods: the fraction of training done, inputs within bounds, names of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from excite._core.background import DeferredChecks
from excite._core.calls import Batch, check_finite, tensors
from excite._core.checks import Bounds, check_number, shown
from excite._core.intercept.affine import clean_path, layer_name
from excite._core.intercept.names import OUTPUT, module_outputs
from excite._core.preserve import capturing
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, ModelError
from excite.excitation.radius import unknown_layer


def check_fraction(fraction: object) -> float:
    """The argument of `advance`, 0 to 1."""
    return check_number(fraction, "advance: the fraction of training done", 0, 1)


def check_input(
    x: Batch, at_input: tuple[str, str] | None, bounds: Bounds | None, deferred: DeferredChecks | None = None
) -> None:
    """Finite values within the bounds; a tensor of floating-point numbers where the input itself is perturbed.

    `at_input`: what perturbs the input, and what to do where it cannot be perturbed; None where nothing does.

    With `deferred`, values on a GPU are judged without waiting for it; tensors among the bounds must be on the device of x.
    """
    first = x if isinstance(x, Tensor) else tensors(x)[0]
    if first.is_cuda and capturing():  # the same call was checked before it was captured
        return
    if deferred is None:
        check_finite(x)
    if at_input is not None and not (isinstance(x, Tensor) and x.is_floating_point()):
        setting, advice = at_input
        described = f"{x.dtype} values" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise InputError(
            f"{setting} perturbs the model's input: expected one tensor of floating-point numbers; got {described}: {advice}"
        )
    if deferred is not None:
        _check_deferred(x, bounds, deferred)
    elif bounds is not None:
        _check_bounds(first, bounds)


def place_bounds(bounds: Bounds | None, x: Batch, placed: dict[object, tuple[Bounds, Bounds]]) -> Bounds | None:
    """The bounds where x is and in its precision; `placed` remembers them, so that no step copies them to a GPU."""
    if bounds is None or not any(isinstance(b, Tensor) for b in bounds):
        return bounds
    first = tensors(x)[0]
    key = (first.device, first.dtype)
    if key not in placed or placed[key][0] is not bounds:
        with torch.inference_mode(False):  # autograd will save them
            low, high = (b.to(first.device, first.dtype) if isinstance(b, Tensor) else b for b in bounds)
        placed[key] = bounds, (low, high)
    return placed[key][1]


def _check_bounds(first: Tensor, bounds: Bounds) -> None:
    """Waits for the device."""
    if bool(_outside(first, bounds)):
        raise InputError(_out_of_bounds(bounds, float(first.min()), float(first.max())))


def _check_deferred(x: Batch, bounds: Bounds | None, deferred: DeferredChecks) -> None:
    """Judges the smallest and the largest value of each tensor, which are NaN where any value is."""
    for number, leaf in enumerate(tensors(x)):
        within = bounds if number == 0 else None
        if leaf.numel() and (leaf.is_floating_point() or within is not None):
            values = leaf.detach()
            numbers = torch.stack(torch.aminmax(values.float() if values.itemsize == 1 else values))
            if within is not None and any(isinstance(b, Tensor) for b in within):
                numbers = torch.cat([numbers, _outside(values, within).to(numbers)[None]])
            deferred.add(numbers, partial(_judge, bounds=within, dtype=values.dtype))


def _judge(numbers: Sequence[float], bounds: Bounds | None, dtype: torch.dtype) -> str | None:
    """Measurements that decide whether a tensor is valid: (smallest value, largest value, whether any value is out of bounds that are tensors)."""
    low, high = numbers[:2]
    if not (math.isfinite(low) and math.isfinite(high)):
        return "expected finite inputs; some values are NaN or infinite: clean the data"
    outside = bool(numbers[2:] and numbers[2])
    if bounds is not None and len(numbers) == 2:  # in the precision of the values
        outside = bool(_outside(torch.tensor([low, high], dtype=dtype), bounds))
    return _out_of_bounds(bounds, low, high) if bounds is not None and outside else None


def _outside(values: Tensor, bounds: Bounds) -> Tensor:
    """Whether any value is out of the bounds."""
    # Numbers in the precision of the values, which are rounded to it; filled in on the device, not copied there.
    low, high = (b.to(values) if isinstance(b, Tensor) else values.new_full((), b) for b in bounds)
    try:
        return ((values < low) | (values > high)).any()
    except RuntimeError as error:
        raise InputError(
            f"bounds: shapes {tuple(low.shape)} and {tuple(high.shape)} do not broadcast to inputs of shape {tuple(values.shape)}"
        ) from error


def _out_of_bounds(bounds: Bounds, low: float, high: float) -> str:
    return f"expected inputs within bounds {shown(bounds)}; got values from {low:g} to {high:g}: scale the data or change the bounds"


def check_names(names: Iterable[str], known: Sequence[str], model: nn.Module) -> None:
    """Raises an InputError for a name that is neither that of a layer (`known`) nor PATH:output of a module."""
    for name in names:
        first = name.split("#")[0]
        if first.endswith(OUTPUT):
            if not module_outputs(model, [first]):
                paths = [clean_path(path) + OUTPUT for path, _ in model.named_modules() if path]
                raise unknown_layer(name, paths)
        elif name not in known and first not in known:
            raise unknown_layer(name, known)


def possible_layers(model: nn.Module) -> list[str]:
    """Names that affine calls of this model can have: paths of weights, and of modules whose weight is computed."""
    refuse_lazy(model)
    weights = [layer_name(clean_path(path)) for path, parameter in model.named_parameters() if parameter.dim()]
    computed = [
        clean_path(path) for path, module in model.named_modules() if path and any(True for _ in module.parameters())
    ]
    if not weights:
        raise ModelError(
            "the model has no affine layer (linear, convolution or product with a parameter): nothing to excite"
        )
    return list(dict.fromkeys([*weights, *computed]))
