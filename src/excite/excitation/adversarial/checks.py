"""Checks of the arguments of `AdversarialTraining`."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, signature

from torch import Tensor, nn

from excite._core.checks import (
    Bounds,
    check_layers,
    check_number,
)
from excite.errors import InputError
from excite.excitation.adversarial.ascent import HiddenOptions
from excite.excitation.adversarial.weight_perturbation import perturbed_weights
from excite.excitation.checks import check_input, check_names, place_bounds
from excite.excitation.radius import (
    Stages,
    check_radius,
)


def check_input_radius(radius: object) -> float | Stages:
    """The radius of the input: a number, or `Stages` of a number."""
    checked = check_radius(radius)
    full = checked.radius if isinstance(checked, Stages) else checked
    if not isinstance(full, int | float):
        raise InputError(f"radius: expected a number or Stages of a number for the input; got {radius!r}")
    return checked  # type: ignore[return-value]


def check_hidden(hidden: object, trades: float = 0.0) -> HiddenOptions:
    """The options of hidden layers."""
    if hidden is not None and not isinstance(hidden, HiddenOptions):
        raise InputError(f"hidden: expected HiddenOptions; got {hidden!r}")
    options = HiddenOptions() if hidden is None else hidden
    if trades and options.fraction < 1:
        raise InputError("trades: its search begins where the error of every sample is 0: expected fraction 1")
    return options


def check_held_out(held_out: object, bounds: Bounds | None) -> object:
    """What was passed, whose points lie within the bounds; `GapController` checks everything else."""
    if isinstance(held_out, tuple | list) and held_out and isinstance(x := held_out[0], Tensor) and x.numel():
        try:
            check_input(x, None, place_bounds(bounds, x, {}))
        except InputError as error:
            raise InputError(f"held_out: {error}") from error
    return held_out


def check_awp(awp: object, model: nn.Module) -> float:
    """The size of weight perturbations, 0 for none."""
    size = check_number(awp, "awp", 0, 1)
    if size:
        perturbed_weights(model)  # refuses sharded ones
    return size


def check_free(awp: float, keep_best: bool, hidden: HiddenOptions, optimizer: object) -> None:
    """Refuses settings that need a search before the weights are updated, and optimizers that evaluate the loss themselves."""
    for name, is_set in (("awp", awp > 0), ("keep_best", keep_best), ("HiddenOptions(once=True)", hidden.once)):
        if is_set:
            raise InputError(f"free: expected no {name}, which needs a search before the weights are updated")
    step = getattr(optimizer, "step", None)
    if not callable(step) or not callable(getattr(optimizer, "zero_grad", None)):
        raise InputError(f"free_loss: expected an optimizer of torch.optim; got {type(optimizer).__name__}")
    closure = signature(step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise InputError(
            f"free_loss updates the weights itself: {type(optimizer).__name__} needs a closure; use loss, or another optimizer"
        )


def check_trades(trades: object, loss: str, random_start: bool) -> float:
    """The weight of the divergence in TRADES, 0 for none."""
    weight = check_number(trades, "trades", 0)
    if weight and (loss != "cross-entropy" or not random_start):
        raise InputError(
            "trades: expected loss='cross-entropy' and random_start=True, since the divergence of equal outputs has no gradient"
        )
    return weight


def full_radius(radius: float | Stages) -> float:
    """The radius of the input at the end of training."""
    full = radius.radius if isinstance(radius, Stages) else radius
    return float(full)  # type: ignore[arg-type]


def check_hidden_layers(layers: str | Sequence[str], known: Sequence[str], model: nn.Module) -> str | Sequence[str]:
    """Names of hidden layers that the model has, or "all"."""
    checked = check_layers(layers)
    if checked == "input":
        raise InputError(
            "layers: expected 'all' or names of hidden layers; for the input alone leave hidden_radius at 0"
        )
    check_names(() if checked == "all" else checked, known, model)
    return checked
