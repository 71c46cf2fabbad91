"""Arguments of `margins`: its options, and checks of points, bounds, outputs and labels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from excite._core.calls import check_finite
from excite._core.checks import check_count, check_dense, check_flag, check_layers, check_number, check_seed, shown
from excite.errors import InputError, ModelError
from excite.margin.budget import SearchBudget, check_budget

Certificate = Literal["lipschitz", "interval", "linear", "exact"]
CERTIFICATES: tuple[Certificate, ...] = ("lipschitz", "interval", "linear", "exact")


@dataclass(frozen=True)
class SearchOptions:
    """How `excite.margins` searches, and what it certifies.

    Args:
        steps: gradient steps of one search, at least 2.
        restarts: independent searches per point, of which the smallest perturbation counts. By default three, or twelve for
            inputs of fewer than 1024 elements, where local minima matter more.
        evidence: whether to check that the search worked, with a gradient-free search among others.
        certify: lower bounds. True: where a Lipschitz constant of the model is known. By name, or refused: "lipschitz";
            "interval" and "linear" bounds, larger and slower in this order, where all operators have one; "exact" for small
            piecewise-linear networks, by mixed-integer programs of at most `seconds` each. False: none.
        lipschitz: a Lipschitz constant of the model for these lower bounds, in the same norm for inputs and outputs.
        seed: of the random starts and directions.
        seconds: time limit of one mixed-integer program of certify="exact": one per point and class.
        budget: (200, "passes"): forward and backward passes per point at most, or (30, "seconds"): of the whole search, about. Fewer
            and shorter searches are made where it is small, and `Margins.left_out` says which. Evidence and certificates come on
            top.

    Raises:
        InputError: if a value is of the wrong kind or out of range.

    Example:
        >>> quick = SearchOptions(steps=20, restarts=1, evidence=False, certify=False)
        >>> excite.margins(model, x, y, options=quick)
    """

    steps: int = 40
    restarts: int | None = None
    evidence: bool = True
    certify: bool | Certificate = True
    lipschitz: float | None = None
    seed: int = 0
    seconds: float = 60.0
    budget: SearchBudget | None = None

    def __post_init__(self) -> None:
        checked = {
            "steps": check_count(self.steps, "steps", 2),
            "restarts": None if self.restarts is None else check_count(self.restarts, "restarts"),
            "evidence": check_flag(self.evidence, "evidence"),
            "certify": _check_certify(self.certify),
            "lipschitz": None if self.lipschitz is None else check_number(self.lipschitz, "lipschitz", 0),
            "seed": check_seed(self.seed),
            "seconds": check_number(self.seconds, "seconds", 0),
            "budget": check_budget(self.budget),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _check_certify(certify: object) -> bool | Certificate:
    if isinstance(certify, str):
        for name in CERTIFICATES:
            if certify == name:
                return name
        names = ", ".join(repr(name) for name in CERTIFICATES)
        raise InputError(f"certify: expected True, False, {names}; got {shown(certify)}")
    return check_flag(certify, "certify")


def check_options(options: object) -> SearchOptions:
    """The options; the defaults for None."""
    if options is not None and not isinstance(options, SearchOptions):
        raise InputError(f"options: expected excite.margin.SearchOptions; got {shown(options)}")
    return options or SearchOptions()


def check_margin_layers(layers: str | Sequence[str], relative: object, options: SearchOptions) -> str | tuple[str, ...]:
    """Checks which layers are perturbed, and that `relative` and the options go with them: "input", "all" or names of layers."""
    checked = check_layers(layers)
    if check_flag(relative, "relative") and checked == "input":
        raise InputError("relative=True compares layers with each other: choose layers='all' or a list of names")
    if options.lipschitz is not None and checked != "input":
        raise InputError(
            f"lipschitz={options.lipschitz:g} bounds changes of the input only: leave it out, or choose layers='input'"
        )
    if isinstance(options.certify, str) and checked != "input":
        raise InputError(
            f"certify={options.certify!r} bounds changes of the input only: leave it out, or choose layers='input'"
        )
    return checked


def check_decisions(f: Tensor, labels: Tensor) -> None:
    """Warns where none of the decisions by outputs (N, m) is among the labels, which are then hardly those of this model.

    Of fewer points than 20 all may just be wrong.
    """
    decided, labelled = (tensor.unique().tolist() for tensor in (f.argmax(1), labels))
    if len(f) >= 20 and not set(decided) & set(labelled):
        warnings.warn(
            f"the model has {f.shape[1]} outputs, and no label is among the classes it decides for: labels {_listed(labelled)}, classes "
            f"{_listed(decided)}. All margins are 0; pick the outputs of the labels with output=, or relabel the data",
            stacklevel=5,
        )


def _listed(classes: list[int]) -> str:
    return ", ".join(str(label) for label in classes[:5]) + (", …" if len(classes) > 5 else "")


def check_points(x: Any, integers: bool = False) -> Tensor:
    """The points, a copy; `integers`: token ids and the like will do, since x itself need not be perturbed."""
    if not isinstance(x, Tensor):
        raise InputError(f"expected the inputs x as one tensor (N, ...); got {type(x).__name__}: convert or stack them")
    check_dense(x)
    if x.dim() == 0 or x.numel() == 0:
        raise InputError(f"expected at least one input, with a batch axis in front; got shape {tuple(x.shape)}")
    is_integer = integers and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    if x.dtype not in (torch.float32, torch.float64) and not is_integer:
        raise InputError(
            f"expected inputs in float32 or float64; got {x.dtype}: convert with x.float(). Integer inputs such as "
            "token ids have no margin: give the model their embeddings instead, or perturb later layers, layers='all'"
        )
    check_finite(x)
    return x.detach().clone()


def points_within(bounds: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
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


def check_outputs(f: Tensor, x: Tensor) -> int:
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


def check_labels(y: Any, x: Tensor, classes: int) -> Tensor:
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
    highest = max(classes, 2) - 1
    y = y.detach().reshape(-1)
    good = (y >= 0) & (y <= highest) & (y == y.long())
    if not bool(good.all()):
        expected = "labels 0 or 1 for a model with one output" if classes == 1 else f"labels from 0 to {highest}"
        raise InputError(f"expected {expected}; got {float(y[~good][0]):g}: relabel the data")
    labels: Tensor = y.long().to(x.device)
    return labels
