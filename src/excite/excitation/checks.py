"""Checks of the training methods: the fraction of training done, inputs within bounds, names of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, check_finite, tensors
from excite._core.checks import Bounds, check_number
from excite._core.intercept.affine import clean_path, layer_name
from excite._core.preserve import capturing
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, ModelError


def check_fraction(fraction: object) -> float:
    """The argument of `advance`, 0 to 1."""
    return check_number(fraction, "advance: the fraction of training done", 0, 1)


def check_input(x: Batch, at_input: bool, bounds: Bounds | None) -> None:
    """Finite values within the bounds; a tensor of floating-point numbers where the input itself is perturbed."""
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
