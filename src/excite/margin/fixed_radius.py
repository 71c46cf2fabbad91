"""Robust accuracy: the fraction of points that stay correctly classified however they are perturbed, by attack.

The attack is the search of adversarial training on the trained model: projected steps up the margin loss from random
starts. A point for which it finds no adversarial example may still have one, so the fraction is an upper bound. For one radius the
points that are left are searched again as for margins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor, nn

from excite._core.checks import (
    Bounds,
    Norm,
    check_count,
    check_model,
    check_number,
    check_numbers,
    check_seed,
    check_tensor,
    model_errors,
    parse_norm,
    shown,
)
from excite._core.preserve import device_of, eval_mode
from excite._core.randomness import own_randomness
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError
from excite.excitation import AdversarialTraining
from excite.margin.inputs import SearchOptions
from excite.margin.measure import margins
from excite.margin.result import Margins


@model_errors
def broken_at(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    radii: Sequence[float],
    *,
    norm: str | float = "inf",
    bounds: Bounds | None = None,
    classes: int | None = None,
    threshold: float | None = None,
    steps: int = 20,
    restarts: int = 3,
    batch: int = 1000,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Tensor:
    """The smallest of `radii` at which an attack finds an adversarial example, for each point.

    The smallest radius is tried first. The model is used in evaluation mode; it and the random state stay as they are.

    Args:
        model: the classifier.
        x: points (N, ...).
        y: labels (N,) or (N, 1).
        radii: in ascending order.
        norm: "inf", "2" or "1".
        bounds: (low, high) of the inputs.
        classes: number of classes, as in `AdversarialTraining`; by default the number of outputs.
        threshold: class 1 where a scalar output is larger, as in `AdversarialTraining`.
        steps: steps of an attack.
        restarts: attacks per radius, each from a random start.
        batch: points that are attacked at a time.
        seed: of the random starts.
        progress: called with the fraction done.

    Returns:
        (N,) in float64: −inf for points misclassified unperturbed, +inf where no attack succeeds.

    Raises:
        InputError: if an argument is of the wrong kind, or the radii are not ascending.
    """
    refuse_lazy(check_model(model))  # the number of classes takes a pass
    restarts, batch, seed = check_count(restarts, "restarts"), check_count(batch, "batch"), check_seed(seed)
    radii = check_numbers(radii, "radii", 0)
    if not radii or any(a > b for a, b in pairwise(radii)):
        raise InputError(f"radii: expected numbers in ascending order; got {shown(radii)}")
    _check_points(x, y)
    device = device_of(model)
    classes = _number_of_outputs(model, x[:1].to(device)) if classes is None else classes
    attacks = {
        r: AdversarialTraining(model, r, norm, steps, None, True, "margin", classes, bounds, threshold) for r in radii
    }
    batches = list(zip(x.split(batch), y.split(batch)))
    smallest = []
    with eval_mode(model), own_randomness(seed, device):
        for done, (points, labels) in enumerate(batches, 1):
            smallest.append(_attack(attacks, points.to(device), labels.to(device).reshape(-1), restarts, bounds))
            if progress is not None:
                progress(done / len(batches))
    return torch.cat(smallest)


def _check_points(x: Tensor, y: Tensor) -> None:
    """Refuses points and labels that do not belong together."""
    check_tensor(x, "points"), check_tensor(y, "labels", 1, 2, floating=False)
    if x.dim() == 0 or not len(x) or y.shape not in ((len(x),), (len(x), 1)):
        raise InputError(f"expected as many labels as points, at least one; got {tuple(x.shape)} and {tuple(y.shape)}")


def _number_of_outputs(model: nn.Module, x: Tensor) -> int | None:
    """The columns of the outputs (1, m) if there are several; None for anything else, which is checked elsewhere."""
    with eval_mode(model), torch.no_grad(), own_randomness(0, x.device):
        f = model(x)
    return f.shape[1] if isinstance(f, Tensor) and f.dim() == 2 and f.shape[1] > 1 else None


def _attack(
    attacks: Mapping[float, AdversarialTraining], points: Tensor, labels: Tensor, restarts: int, bounds: Bounds | None
) -> Tensor:
    """The smallest radius by point of one batch, as `broken_at` returns it; `attacks` by radius, in ascending order."""
    smallest = torch.full((len(points),), -torch.inf, dtype=torch.float64)
    at = torch.arange(len(points))  # the points that are left
    correct = next(iter(attacks.values())).predict(points) == labels
    for radius, attack in attacks.items():
        for _ in range(restarts if radius else 0):
            points, labels, at, correct = points[correct], labels[correct], at[correct.cpu()], correct[correct]
            if not len(points):
                break
            moved = points + attack.perturbations(points, labels)
            if bounds is not None:
                moved = moved.clamp(*bounds)  # type: ignore[arg-type]  # rounding may lead out by one unit
            correct = attack.predict(moved) == labels
            smallest[at[~correct.cpu()]] = radius
    smallest[at[correct.cpu()]] = torch.inf
    return smallest


@dataclass(frozen=True)
class RobustAccuracy:
    """The fraction of points that are classified correctly and stay so within one radius, with evidence; converts to float.

    Attributes:
        value: the fraction: an upper bound, since an adversarial example may have been missed.
        low: lower end of the 95 % interval for the fraction of all data that the points are a sample of.
        high: its upper end.
        radius: size of the perturbations.
        norm: "inf", "2" or "1".
        broken: (N,), points that are misclassified or have an adversarial example within the radius.
        certified: the fraction with a certified lower bound above the radius, a lower bound; None if nothing was certified.
        margins: margins of the points that the quick attack left, with evidence; None if it left none.

    Example:
        >>> model, x = torch.nn.Linear(4, 10), torch.rand(6, 4)
        >>> found = excite.robust_accuracy(model, x, model(x).argmax(1), 0.01, classes=10, bounds=(0, 1))
        >>> 0 <= found.low <= float(found) <= found.high <= 1
        True
    """

    value: float
    low: float
    high: float
    radius: float
    norm: Norm
    broken: Tensor
    certified: float | None
    margins: Margins | None

    def __float__(self) -> float:
        return self.value

    @property
    def flags(self) -> tuple[str, ...]:
        """Reasons not to trust the fraction, one sentence each (see `Evidence.flags`)."""
        return self.margins.flags if self.margins is not None else ()

    @property
    def trusted(self) -> bool:
        """Whether the search worked on the points that are counted as robust; true if there are none."""
        return self.margins is None or self.margins.trusted

    def __str__(self) -> str:
        lines = [
            f"robust accuracy at {self.radius:.4g} in the norm {self.norm!r}: {self.value:.1%} of {len(self.broken)} points "
            f"(95 % interval {self.low:.1%} to {self.high:.1%})"
        ]
        if self.certified is not None:
            lines.append(f"certified: {self.certified:.1%}")
        if self.flags:
            lines += ["not to be trusted, it may be much smaller:", *(f"  {flag}" for flag in self.flags)]
        return "\n".join(lines)


@overload
def robust_accuracy(model: nn.Module, x: Tensor, y: Tensor, radii: float, **options: Any) -> RobustAccuracy: ...
@overload
def robust_accuracy(model: nn.Module, x: Tensor, y: Tensor, *, eps: float, **options: Any) -> RobustAccuracy: ...
@overload
def robust_accuracy(model: nn.Module, x: Tensor, y: Tensor, radii: Sequence[float], **options: Any) -> list[float]: ...
def robust_accuracy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    radii: float | Sequence[float] | None = None,
    *,
    eps: float | None = None,
    **options: Any,
) -> list[float] | RobustAccuracy:
    """The fraction of points that are classified correctly and stay so under attack: an upper bound.

    For several radii a quick attack is used. For one radius, given as a number, the points that it leaves are searched again
    as in `excite.margins`, which finds more, and the result says whether to trust it.

    Args:
        model: the classifier; its state stays as it is.
        x: points (N, ...).
        y: labels (N,) or (N, 1).
        radii: one radius, or several in ascending order.
        eps: one radius, instead of `radii`.
        **options: those of `broken_at`: norm, bounds, classes, threshold, steps, restarts, batch, seed, progress. For one
            radius also `search`, the `SearchOptions` of the second search.

    Returns:
        One fraction per radius; `RobustAccuracy` for one radius given as a number.

    Raises:
        InputError: if an argument is of the wrong kind, or the radii are not ascending.

    Example:
        >>> model, x = torch.nn.Linear(4, 10), torch.rand(6, 4)
        >>> excite.robust_accuracy(model, x, model(x).argmax(1), [0, 8 / 255], classes=10, bounds=(0, 1))
        >>> print(excite.robust_accuracy(model, x, model(x).argmax(1), eps=8 / 255, bounds=(0, 1)))
    """
    if (radii is None) == (eps is None):
        raise InputError("expected either radii or eps: the size of the perturbations, such as eps=8 / 255")
    if radii is None:
        radii = check_number(eps, "eps", 0)
    if isinstance(radii, int | float) and not isinstance(radii, bool):
        return _with_evidence(model, x, y, check_number(radii, "radii", 0), **options)
    radii = check_numbers(radii, "radii", 0)
    if "search" in options:
        raise InputError("search: the second search is made for one radius only, given as a number: leave search out")
    smallest = broken_at(model, x, y, radii, **options)
    return [float((smallest > radius).double().mean()) for radius in radii]


def _with_evidence(
    model: nn.Module, x: Tensor, y: Tensor, radius: float, *, search: SearchOptions | None = None, **options: Any
) -> RobustAccuracy:
    """A quick attack on all points, then the search for margins on those that it leaves."""
    from scipy.stats import binomtest

    norm = parse_norm(options.get("norm", "inf"))
    smallest = broken_at(model, x, y, [radius], **options)
    left = torch.nonzero(torch.isinf(smallest) & (smallest > 0))[:, 0]
    adversarial, measured = torch.ones(len(x), dtype=torch.bool), None
    if len(left):
        device = device_of(model)
        threshold = options.get("threshold")
        measured = margins(
            model, x[left.to(x.device)].to(device), y[left.to(y.device)].reshape(-1).to(device), norm=norm,
            bounds=options.get("bounds"), threshold=0.5 if threshold is None else threshold, options=search,
        )  # fmt: skip
        adversarial[left] = measured.values <= radius
    num_robust = int((~adversarial).sum())
    interval = binomtest(num_robust, len(x)).proportion_ci(0.95)
    safe = None if measured is None or measured.lower is None else float((measured.lower > radius).sum()) / len(x)
    low, high = float(interval.low), float(interval.high)  # NumPy scalars with some versions of SciPy
    return RobustAccuracy(num_robust / len(x), low, high, radius, norm, adversarial, safe, measured)
