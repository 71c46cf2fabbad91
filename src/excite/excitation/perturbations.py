"""Perturbations of one signal: how they enter it, the steepest step of each norm, and the ball and the bounds they stay in.

The steepest step for the gradient g of one sample is the direction of unit norm along which a linear function grows fastest:
sign(g) for the infinity norm, g/‖g‖₂ for the 2-norm, and for the 1-norm the unit vector of the largest |g_i| with its sign.
Along it a linear function grows by the dual norm of g.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from excite._core.checks import Bounds, Norm
from excite._core.layout import Layout
from excite.errors import InputError
from excite.excitation.radius import Radius, Relative, Stages
from excite.excitation.radius_control import FitController


class PerturbationMode(Protocol):
    """How a perturbation enters a signal."""

    name: str

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        """The signal under the perturbation."""

    def between(self, signal: Tensor, moved: Tensor) -> Tensor:
        """The perturbation that leads from the signal to `moved`."""

    def slope(self, signal: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient with respect to the signal to that with respect to the perturbation, at zero.

        Applied to the latter, it has the sign in which a step up the gradient moves the signal.
        """


class Additive:
    """h becomes h + d (equation 15)."""

    name = "additive"

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        """Returns h + d."""
        return signal + perturbation

    def between(self, signal: Tensor, moved: Tensor) -> Tensor:
        """Returns the perturbation d that moves h to `moved`."""
        return moved - signal

    def slope(self, signal: Tensor, gradient: Tensor) -> Tensor:
        """Returns the gradient with respect to d, which is the gradient with respect to h."""
        return gradient


class Multiplicative:
    """h becomes h·(1 + d), entry by entry (section 7.2): an excitation that grows with the signals it perturbs."""

    name = "multiplicative"

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        """Returns h (1 + d), elementwise."""
        return signal * (1 + perturbation)

    def between(self, signal: Tensor, moved: Tensor) -> Tensor:
        """Returns the perturbation d that moves h to `moved`; 0 where h is 0."""
        # Where the signal is 0 no factor changes it.
        return torch.where(signal == 0, 0, moved / torch.where(signal == 0, 1, signal) - 1)

    def slope(self, signal: Tensor, gradient: Tensor) -> Tensor:
        """Returns the gradient with respect to d: the gradient with respect to h, times h."""
        return gradient * signal


MODES: dict[str, PerturbationMode] = {mode.name: mode for mode in (Additive(), Multiplicative())}


def check_mode(kind: object, radius: Radius) -> PerturbationMode:
    """The mode by its name; multiplicative perturbations take radii below 1, and none relative to the signal."""
    if not isinstance(kind, str) or kind not in MODES:
        raise InputError(f"kind: expected {' or '.join(map(repr, MODES))}; got {kind!r}")
    if kind == "multiplicative":
        full = radius.radius if isinstance(radius, Stages) else radius
        if isinstance(full, Relative | FitController):
            raise InputError(
                "multiplicative perturbations are relative to the signal already: give a number or a dict instead of "
                f"{'Relative' if isinstance(full, Relative) else repr('auto')}"
            )
        largest = max(full.values()) if not isinstance(full, int | float) else full
        if largest >= 1:
            raise InputError(
                f"multiplicative radius {largest:g}: expected less than 1; from 1 on, h·(1 + d) lets a signal vanish or flip"
            )
    return MODES[kind]


@dataclass(frozen=True)
class PerturbedInput:
    """The perturbations that the input of one layer may have: those of norm at most `radius` that keep it within `bounds`.

    `layout` says where the batch lies in the signal. The clean signal is kept only where there are bounds, which need it.
    `bounded` is a tensor where only the device knows whether the bounds hold for this signal; where not, they are infinite.
    Where the layout has tokens, each of them has a ball of its own; `allowed` (B, tokens) says which are perturbed, None: all.
    """

    layout: Layout
    radius: float | Tensor
    bounds: Bounds | None
    clean: Tensor | None
    mode: PerturbationMode = MODES["additive"]
    bounded: Tensor | None = None
    allowed: Tensor | None = None

    def where(self, bounded: Tensor | None) -> PerturbedInput:
        """The same, with bounds only if `bounded` is true; None: they hold."""
        if bounded is None or self.bounds is None or self.clean is None:
            return self
        low, high = (b if isinstance(b, Tensor) else self.clean.new_full((), b) for b in self.bounds)
        bounds = torch.where(bounded, low, -torch.inf), torch.where(bounded, high, torch.inf)
        return replace(self, bounds=bounds, bounded=bounded)

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        """The signal under the perturbation, in its own precision."""
        moved = self.mode.moved(signal, perturbation)
        if self.bounds is not None:
            # Rounding may lead out of the bounds by one unit; put the value right without changing the gradient.
            moved = moved + (moved.detach().clamp(*self.bounds) - moved.detach())  # type: ignore[arg-type]
        return moved.to(signal.dtype)

    def step(self, at: Tensor | None, gradient: Tensor, norm: Norm, steps: int, samples: int) -> Tensor:
        """The perturbation after one steepest step of length radius/steps up the gradient; `at` None: the first step.

        `steps` of them from zero cannot leave the ball of `radius`, so there is nothing to project but onto the bounds.
        """
        unit, length = self.steepest(at, gradient, norm, samples), self.radius / steps
        if at is not None and isinstance(length, float) and unit.dtype == at.dtype:
            return self.within_bounds(torch.add(at, unit, alpha=length))  # one pass over memory instead of two
        # In the precision of the signal it is added to: a wider one would be rounded away, and costs twice the memory.
        step = (unit * length).to(gradient.dtype)
        return self.within_bounds(step if at is None else at + step)

    def first_step(self, gradient: Tensor, norm: Norm, steps: int, samples: int) -> Tensor:
        """The first step of both searches, up for the first half of the doubled batch and down for the second."""
        up = self.step(None, gradient, norm, steps, samples)
        if self.bounds is None:
            return self.layout.mirrored(up)
        return self.layout.join(up, self.step(None, -gradient, norm, steps, samples))

    def projected_step(self, at: Tensor, gradient: Tensor, norm: Norm, length: float | Tensor, samples: int) -> Tensor:
        """The perturbation after one steepest step of `length`, projected onto the ball and the bounds."""
        moved = at + (length * self.steepest(at, gradient, norm, samples)).to(at.dtype)
        rows = project(self.layout.rows(moved, samples), norm, self.radius)
        return self.within_bounds(self.layout.from_rows(rows, moved))

    def random(self, like: Tensor, norm: Norm, samples: int) -> Tensor:
        """A point drawn uniformly from the ball for each sample, then moved into the bounds; shaped like `like`."""
        rows = random_point(self.layout.rows(like, samples), norm, self.radius)
        drawn = self.at_allowed(self.layout.from_rows(rows, like).to(like.dtype), samples)
        return self.within_bounds(drawn)

    def at_allowed(self, tensor: Tensor, samples: int) -> Tensor:
        """A tensor like the signal, zero at the tokens that are not perturbed."""
        if self.allowed is None:
            return tensor
        rows = self.layout.rows(tensor, samples)
        allowed = self.allowed.to(rows.dtype).reshape(-1, 1)
        return self.layout.from_rows(rows * allowed.repeat(len(rows) // len(allowed), 1), tensor)

    def steepest(self, at: Tensor | None, gradient: Tensor, norm: Norm, samples: int) -> Tensor:
        """The unit step up the gradient, along what the bounds leave free."""
        signal = self.clean
        if signal is not None and self.bounds is not None:
            if gradient.shape != signal.shape:
                signal = self.layout.join(signal, signal)
            low, high = self.bounds
            moved = signal if at is None else self.mode.moved(signal, at)
            uphill = self.mode.slope(signal, gradient)
            stuck = ((moved >= high) & (uphill > 0)) | ((moved <= low) & (uphill < 0))
            gradient = gradient.masked_fill(stuck, 0)
        return steepest(self.at_allowed(gradient, samples), norm, self.layout, samples)

    def within_bounds(self, perturbation: Tensor) -> Tensor:
        """The perturbation, changed where it would take the signal out of the bounds."""
        signal = self.clean
        if signal is None or self.bounds is None:
            return perturbation
        if perturbation.shape != signal.shape:
            signal = self.layout.join(signal, signal)
        within = self.mode.between(signal, self.mode.moved(signal, perturbation).clamp(*self.bounds))  # type: ignore[arg-type]
        return within if self.bounded is None else torch.where(self.bounded, within, perturbation)


def steepest(gradient: Tensor, norm: Norm, layout: Layout, samples: int) -> Tensor:
    """Unit steps per sample (per token where the layout has tokens), in the layout of `gradient`; zero where its gradient is zero."""
    if norm == "inf":
        return gradient.sign()
    rows = layout.rows(gradient, samples)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if norm == "2":
        # Scaled by the largest entry first: squares of tiny gradients underflow.
        largest = rows.abs().amax(1, keepdim=True)
        rows = rows / torch.where(largest > 0, largest, 1)
        length = rows.norm(dim=1, keepdim=True)
        rows = rows / torch.where(length > 0, length, 1)
    else:
        index = rows.abs().argmax(1, keepdim=True)
        rows = torch.zeros_like(rows).scatter_(1, index, rows.gather(1, index).sign())
    return layout.from_rows(rows, gradient)


class BestValues:
    """Of several sets of tensors by layer, for each sample those with the largest score.

    Args:
        layouts: Where the batch lies in the tensors of each layer.
        samples: How many samples they have.
    """

    def __init__(self, layouts: Mapping[str, Layout], samples: int):
        self._layouts, self._samples = layouts, samples
        self._scores: Tensor | None = None
        self.values: dict[str, Tensor] = {}

    def update(self, values: Mapping[str, Tensor], scores: Tensor) -> Tensor:
        """Takes over the tensors of samples whose score, (B,), is larger than before, and returns which those are, (B,)."""
        if self._scores is None:
            self._scores, self.values = scores, {name: value.clone() for name, value in values.items()}
            return torch.ones_like(scores, dtype=torch.bool)
        better = scores > self._scores
        self._scores = torch.where(better, scores, self._scores)
        for name, value in values.items():
            layout = self._layouts[name]
            new, old = (layout.by_sample(tensor, self._samples) for tensor in (value, self.values[name]))
            self.values[name] = layout.from_samples(torch.where(better[:, None], new, old), value)
        return better


def dual_norm(rows: Tensor, norm: Norm) -> Tensor:
    """By how much a linear function with these gradients, (B, n), grows along the steepest unit step, (B,)."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    dual: Tensor = rows.norm(p={"inf": 1.0, "2": 2.0, "1": torch.inf}[norm], dim=1)
    return dual


def project(rows: Tensor, norm: Norm, radius: float | Tensor) -> Tensor:
    """The nearest point of the ball in the 2-norm, for each row of (B, n)."""
    if norm == "inf":
        return rows.clamp(-radius, radius)  # type: ignore[arg-type]
    length: Tensor = rows.norm(p=float(norm), dim=1, keepdim=True)
    if norm == "2":
        return rows * (radius / length.clamp(min=torch.finfo(rows.dtype).tiny)).clamp(max=1)
    # Soft thresholding at the one level where the sum of what remains is the radius.
    sorted_, _ = rows.abs().sort(1, descending=True)
    above = (sorted_.cumsum(1) - radius) / torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
    count = (sorted_ > above).sum(1, keepdim=True).clamp(min=1)
    level = above.gather(1, count - 1)
    return torch.where(length <= radius, rows, rows.sign() * (rows.abs() - level).clamp(min=0))


def random_point(like: Tensor, norm: Norm, radius: float | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A point drawn uniformly from the ball, for each row of (B, n); from the global random state without a generator."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)

    batch, n = like.shape
    if norm == "inf":
        cube: Tensor = radius * (2 * uniform(batch, n) - 1)
        return cube
    if norm == "2":
        rows = torch.randn((batch, n), generator=generator, device=like.device, dtype=like.dtype)
    else:  # exponential sizes, normalized, are uniform on the simplex; then random signs
        rows = (1 - uniform(batch, n)).log() * (2 * (uniform(batch, n) < 0.5) - 1)
    length = rows.norm(p=float(norm), dim=1, keepdim=True).clamp(min=torch.finfo(like.dtype).tiny)
    ball: Tensor = rows * (radius * uniform(batch, 1).pow(1 / n) / length)
    return ball
