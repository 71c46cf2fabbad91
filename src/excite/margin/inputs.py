"""What `margins` takes, checked once at the door."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from excite._core.calls import check_finite
from excite._core.checks import check_count, check_dense, check_flag, check_number, shown
from excite.errors import InputError, ModelError


def checked_layers(layers: Any, relative: Any) -> str | tuple[str, ...]:
    """ "input", "all" or names of layers."""
    check_flag(relative, "relative")
    if isinstance(layers, str):
        if layers not in ("input", "all"):
            raise InputError(
                f"layers: expected 'input', 'all' or a list of layer names; got {layers!r}: for one layer give [{layers!r}]"
            )
        if relative and layers == "input":
            raise InputError("relative=True compares layers with each other: choose layers='all' or a list of names")
        return layers
    if not isinstance(layers, list | tuple) or not layers or not all(isinstance(name, str) for name in layers):
        raise InputError(f"layers: expected 'input', 'all' or a list of at least one layer name; got {shown(layers)}")
    return tuple(layers)


def checked_points(x: Any, integers: bool = False) -> Tensor:
    """The points, a copy; `integers`: token ids and the like will do, since x itself need not be perturbed."""
    if not isinstance(x, Tensor):
        raise InputError(f"expected the inputs x as one tensor (N, ...); got {type(x).__name__}: convert or stack them")
    check_dense(x)
    if x.dim() == 0 or x.numel() == 0:
        raise InputError(f"expected at least one input, with a batch axis in front; got shape {tuple(x.shape)}")
    whole = integers and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    if x.dtype not in (torch.float32, torch.float64) and not whole:
        raise InputError(
            f"expected inputs in float32 or float64; got {x.dtype}: convert with x.float(). Integer inputs such as "
            "token ids have no margin: give the model their embeddings instead, or perturb later layers, layers='all'"
        )
    check_finite(x)
    return x.detach().clone()


def checked_bounds(bounds: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """(lowest, highest) as tensors that broadcast to x; x must lie between them."""
    if bounds is None:
        return None
    if not x.is_floating_point():
        raise InputError(f"bounds restrict inputs that are perturbed; got {x.dtype}, which are not: leave bounds out")
    try:
        low, high = (
            torch.as_tensor(
                bound if not isinstance(bound, Tensor) else check_dense(bound, "bounds"), dtype=x.dtype, device=x.device
            )
            for bound in bounds
        )
        low.expand_as(x), high.expand_as(x)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"expected bounds as (lowest, highest), numbers or tensors that broadcast to {tuple(x.shape)}; got {shown(bounds)}"
        ) from error
    if bool(torch.isnan(low).any()) or bool(torch.isnan(high).any()) or bool((low > high).any()):
        raise InputError(f"expected bounds with lowest ≤ highest; got {shown(bounds)}")
    outside = (x < low) | (x > high)
    if bool(outside.any()):
        points = int(outside.flatten(1).any(1).sum()) if x.dim() > 1 else int(outside.sum())
        raise InputError(
            f"expected inputs within the bounds; {points} of {len(x)} points lie outside (inputs go from "
            f"{float(x.min()):.4g} to {float(x.max()):.4g}): scale the data or widen the bounds"
        )
    return low, high


def checked_outputs(f: Tensor, x: Tensor) -> int:
    """The number of classes, 1 for scalar outputs."""
    if f.shape not in ((len(x),), (len(x), 1)) and (f.dim() != 2 or len(f) != len(x)):
        raise ModelError(
            f"expected outputs of shape ({len(x)},), ({len(x)}, 1) or ({len(x)}, classes) for {len(x)} inputs; got "
            f"{tuple(f.shape)}: say with output= which part to use"
        )
    if not f.numel():
        raise ModelError(f"expected at least one output per input; got outputs of shape {tuple(f.shape)}")
    if not f.is_floating_point():
        raise ModelError(f"expected floating-point outputs; got {f.dtype}: return logits or scores, not decisions")
    if not bool(torch.isfinite(f).all()):
        raise ModelError("expected finite outputs; the model returns NaN or infinite values at some of the inputs")
    return 1 if f.dim() == 1 else int(f.shape[1])


def checked_labels(y: Any, x: Tensor, classes: int) -> Tensor:
    """Labels as (N,) of type long on the device of x."""
    if not isinstance(y, Tensor):
        try:
            y = torch.as_tensor(y)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(f"expected labels as a tensor of shape ({len(x)},); got {type(y).__name__}") from error
    check_dense(y, "labels")
    allowed = ((len(x),), (len(x), 1)) if classes == 1 else ((len(x),),)
    if tuple(y.shape) not in allowed:
        shapes = " or ".join(map(str, allowed))
        raise InputError(f"expected labels of shape {shapes}; got {tuple(y.shape)}")
    if y.is_complex() or (classes > 1 and y.is_floating_point()) or (classes > 1 and y.dtype == torch.bool):
        raise InputError(f"expected integer labels for {classes} classes; got {y.dtype}: convert with y.long()")
    most = max(classes, 2) - 1
    y = y.detach().reshape(-1)
    good = (y >= 0) & (y <= most) & (y == y.long())
    if not bool(good.all()):
        what = "labels 0 or 1 for a model with one output" if classes == 1 else f"labels from 0 to {most}"
        raise InputError(f"expected {what}; got {float(y[~good][0]):g}: relabel the data")
    labels: Tensor = y.long().to(x.device)
    return labels


def checked_threshold(threshold: Any) -> float:
    return check_number(threshold, "threshold")


def checked_count(name: str, value: Any, least: int) -> int:
    return check_count(value, name, least)
