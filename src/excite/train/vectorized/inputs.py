"""Arguments of an ensemble: checks, and conversion to the shapes it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

import torch
from torch import Tensor

from excite._core.checks import check_count, check_dense, check_number, check_seed, shown, to_array
from excite.errors import InputError
from excite.train.vectorized.perceptrons import Perceptrons
from excite.train.vectorized.sgd import Loss

_MAX_BYTES = 8e9  # bytes of a window's buffers


def take_points(networks: Perceptrons, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Prepared points (1 or S, N, ·) and targets (1 or S, N)."""
    count, inputs = networks.count, networks.form.sizes[0]
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dim() not in (2, 3) or y.dim() not in (1, 2):
        raise InputError(f"expected x (N, {inputs}) or ({count}, N, {inputs}) and y (N,) or ({count}, N) as tensors; got "
                         f"{_shape(x)} and {_shape(y)}")  # fmt: skip
    for name, value, single in (("x", x, 2), ("y", y, 1)):
        if value.dim() == single + 1 and len(value) != count:
            raise InputError(f"{name}: expected one set for each of the {count} networks; got {tuple(value.shape)}")
        check_dense(value, name)
        if value.is_complex() or (not value.is_floating_point() and name == "x"):
            raise InputError(f"x: expected floating point numbers; got {value.dtype}")
        if not value.isfinite().all():
            raise InputError(f"{name} has values that are not finite")
    if x.shape[-1] != inputs or x.shape[-2] != y.shape[-1] or not y.shape[-1]:
        raise InputError(
            f"expected points of {inputs} numbers and a target for each; got x {tuple(x.shape)}, y {tuple(y.shape)}"
        )
    if loss == "bce" and ((y < 0) | (y > 1)).any():
        raise InputError(f"y: expected targets between 0 and 1 for bce; got {y.min():g} to {y.max():g}")
    form = networks.form
    x, y = x.detach().to(form.device, form.dtype), y.detach().to(form.device, form.dtype)
    return networks.prepare(x if x.dim() == 3 else x[None]), y if y.dim() == 2 else y[None]


def take_rates(networks: Perceptrons, lr: float | Sequence[float] | Tensor) -> Tensor:
    """Returns one learning rate per network."""
    rates = torch.from_numpy(to_array("lr", lr)).to(networks.form.device, networks.form.dtype)
    if rates.shape not in ((), (networks.count,)) or not (rates.isfinite() & (rates > 0)).all():
        raise InputError(
            f"lr: expected a positive number, or one for each of the {networks.count} networks; got {shown(lr)}"
        )
    return rates.expand(networks.count)


def check_seeds(networks: Perceptrons, seeds: Sequence[int] | None) -> list[int]:
    """Returns one seed per network."""
    if seeds is not None and not isinstance(seeds, Iterable):
        raise InputError(f"seeds: expected a list of whole numbers; got {shown(seeds)}")
    chosen = list(range(networks.count)) if seeds is None else [check_seed(seed) for seed in seeds]
    if len(chosen) != networks.count:
        raise InputError(f"seeds: expected one for each of the {networks.count} networks; got {len(chosen)}")
    return chosen


def check(
    networks: Perceptrons, epochs: int, batch: int, loss: str, momentum: float, decay: float, layers: str
) -> None:
    """Checks the settings of an ensemble."""
    check_count(epochs, "epochs")
    check_count(batch, "batch")
    if loss not in get_args(Loss):
        raise InputError(f"loss: expected {' or '.join(map(repr, get_args(Loss)))}; got {loss!r}")
    if networks.form.sigmoid and loss != "bce":
        raise InputError(f"networks that end in nn.Sigmoid are trained with 'bce'; got {loss!r}")
    if layers not in ("first", "all"):
        raise InputError(f"layers: expected 'first' or 'all'; got {layers!r}")
    for name, value in (("momentum", momentum), ("weight_decay", decay)):
        check_number(value, name, 0)


def check_memory(networks: Perceptrons, batch: int, width: int, watched: int) -> None:
    """Refuse a window whose points and derivatives would fill the memory."""
    form = networks.form
    numbers = form.sizes[0] + sum(form.sizes[1 : watched + 1])
    needed = width * networks.count * batch * numbers * form.dtype.itemsize
    if needed > _MAX_BYTES:
        fits = max(1, int(width * _MAX_BYTES / needed))
        raise InputError(f"window: {width} steps need {needed / 1e9:.0f} GB; choose at most {fits}")


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
