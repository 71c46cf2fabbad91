"""What the user gives to the training methods, checked: model, steps, layers, bounds and inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from excite._core.calls import Batch, check_finite, tensors
from excite._core.checks import Bounds, check_dense, check_number, is_number, shown
from excite._core.intercept.affine import clean_path, layer_name
from excite._core.preserve import capturing
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, ModelError


def check_fraction(fraction: object) -> float:
    return check_number(fraction, "advance: the fraction of training done", 0, 1)


def check_input(x: Batch, at_input: bool, bounds: Bounds | None) -> None:
    if capturing():  # the same call was checked before it was captured
        return
    check_finite(x)
    if at_input and not (isinstance(x, Tensor) and x.is_floating_point()):
        kind = f"{x.dtype} values" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise InputError(
            f"layers='input' needs a tensor of floating-point numbers to perturb; got {kind}: choose layers='all'"
        )
    if bounds is None:
        return
    first = tensors(x)[0]
    low, high = (torch.as_tensor(b, dtype=first.dtype, device=first.device) for b in bounds)
    try:
        outside = bool((first < low).any()) or bool((first > high).any())
    except RuntimeError as error:
        raise InputError(
            f"bounds: shapes {tuple(low.shape)} and {tuple(high.shape)} do not broadcast to inputs of shape {tuple(first.shape)}"
        ) from error
    if outside:
        raise InputError(
            f"expected inputs within bounds {bounds}; got values from {float(first.min()):g} to "
            f"{float(first.max()):g}: scale the data or change the bounds"
        )


def check_layers(layers: object) -> str | tuple[str, ...]:
    if isinstance(layers, str):
        if layers not in ("all", "input"):
            raise InputError(f"layers: expected 'all', 'input' or a list of layer names; got {shown(layers)}")
        return layers
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(name, str) for name in layers):
        raise InputError(f"layers: expected 'all', 'input' or a list of at least one layer name; got {shown(layers)}")
    return tuple(layers)


def check_bounds(bounds: object) -> Bounds | None:
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list | np.ndarray) or getattr(bounds, "ndim", 1) == 0 or len(bounds) != 2:
        raise InputError(f"bounds: expected (low, high); got {shown(bounds)}")
    if not all(isinstance(b, Tensor) or is_number(b) for b in bounds):
        raise InputError(f"bounds: expected numbers or tensors; got {shown(bounds)}")
    try:
        low, high = (check_dense(b, "bounds") if isinstance(b, Tensor) else float(b) for b in bounds)
        ordered = bool((torch.as_tensor(low) < torch.as_tensor(high)).all())
    except (RuntimeError, OverflowError) as error:
        raise InputError(
            f"bounds: expected numbers, or tensors that broadcast to the inputs; got {shown(bounds)}"
        ) from error
    if not ordered:
        raise InputError(f"bounds: expected low < high; got {shown(bounds)}")
    return low, high


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
