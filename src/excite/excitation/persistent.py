"""Training with persistent excitation (Algorithm 1 of *Persistency of Excitation for Robustness of Neural Networks*)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.excitation.layout import Layout
from excite.excitation.radius import Radius, check_radius, radius_names, radius_of, unknown_layer
from excite.excitation.search import INPUT, Bounds, Perturbations, Setting, evaluate, scalar, search
from excite.norms import parse_norm
from excite.wiring.affine import Names
from excite.wiring.calling import Batch, Pick, batch_size, call, check_finite, pick_output, tensors
from excite.wiring.untouched import capturing, evaluating, untouched
from excite.wiring.wrappers import eagerly, refuse_lazy, unwrap


class PersistentExcitation:
    """A loss that excites every layer: the squared error at the two extreme perturbations of each sample.

    For each sample x the search finds d1 = argmax f(x; d) and d2 = argmin f(x; d), where d_k is added to the input of
    affine call k and lies in the ball of `radius` in `norm`: `steps` steepest steps of length radius/steps from zero.
    The loss is the batch **mean** of ½(f(x;d1) − y)² + ½(f(x;d2) − y)²; at radius 0 that is the mean of (f − y)².

    Args:
        model: any module with one scalar output per sample, (B,) or (B, 1).
        radius: a number, a dict by layer name (layers that are not named are not perturbed), `Relative` or `Stages`.
        norm: "inf", "2" or "1"; the ball of each layer and sample separately.
        layers: "all" (the input of every affine call), "input" (the model's input) or a list of layer names.
        threshold: class 1 where f > threshold; 0.5 for targets 0 and 1.
        bounds: (low, high) of the model's input, numbers or tensors that broadcast to one sample.
        output: which part of what the model returns is f, if it returns a dict or a tuple.
    """

    def __init__(
        self,
        model: nn.Module,
        radius: Radius,
        norm: str | float = "inf",
        steps: int = 4,
        layers: str | Sequence[str] = "all",
        threshold: float = 0.5,
        bounds: Bounds | None = None,
        output: Pick = None,
    ):
        if not isinstance(model, nn.Module):
            raise InputError(f"expected a torch.nn.Module; got {type(model).__name__}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"steps: expected a whole number of at least 1; got {steps!r}")
        if not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise InputError(f"threshold: expected a finite number; got {threshold!r}")
        self.model = model
        self.radius = check_radius(radius)
        self.norm = parse_norm(norm)
        self.steps = steps
        self.layers = _check_layers(layers)
        self.threshold = float(threshold)
        self.bounds = _check_bounds(bounds)
        self.output = output
        self.progress = 0.0
        self._known_layouts: dict[object, list[Layout | None]] = {}
        if self.layers == "input" and radius_names(self.radius):
            raise InputError("layers='input' perturbs the model's input: give one radius instead of one per layer")
        self._check_names(_possible_layers(unwrap(model)))

    def loss(self, x: Batch, y: Tensor) -> Tensor:
        """Batch mean of ½(f(x;d1) − y)² + ½(f(x;d2) − y)²: call `.backward()` on it. y: 0 or 1, (B,) or (B, 1).

        Running statistics and the random state move as in one ordinary forward.
        """
        return self.losses(x, y).mean()

    def losses(self, x: Batch, y: Tensor) -> Tensor:
        """½(f(x;d1) − y)² + ½(f(x;d2) − y)² for each sample, (B,); `loss` is their mean."""
        self._check_input(x)
        target = self._targets(y, batch_size(x))
        if not self._perturbs():
            with eagerly(self.model):
                clean = scalar(pick_output(call(self.model, x), self.output), batch_size(x))
            return (clean - target.to(clean.dtype)).square()
        low, high = self._extremes(x)
        target = target.to(low.dtype)
        return 0.5 * ((high - target).square() + (low - target).square())

    def extremes(self, x: Batch) -> tuple[Tensor, Tensor]:
        """(f(x; argmin), f(x; argmax)), each (B,): what the loss compares with y. Changes nothing in the model.

        Differentiable in the weights where gradients are enabled, for losses of your own.
        """
        self._check_input(x)
        with untouched(unwrap(self.model)):
            if not self._perturbs():
                clean = scalar(pick_output(call(self.model, x), self.output), batch_size(x))
                return clean, clean
            return self._extremes(x)

    def perturbations(self, x: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """(for the minimum, for the maximum) by layer, shaped like the layer's input; the model's own input is ""."""
        self._check_input(x)
        with untouched(unwrap(self.model)):
            found = self._search(x) if self._perturbs() else None
        return {} if found is None else {layer: found.halves(layer) for layer in found.values}

    @torch.no_grad()
    def predict(self, x: Batch) -> Tensor:
        """Labels 0 or 1, (B,): 1 where f > threshold, with the model in evaluation mode."""
        model = unwrap(self.model)
        self._check_input(x)
        with evaluating(model):
            output = scalar(pick_output(call(model, x), self.output), batch_size(x))
        return (output > self.threshold).long()

    def advance(self, fraction: float) -> None:
        """Say that `fraction` of training is done, 0 to 1: moves the radius of `Stages`."""
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise InputError(f"advance: expected the fraction of training done, between 0 and 1; got {fraction!r}")
        self.progress = float(fraction)

    def setting(self) -> tuple[float, ...]:
        """What a step depends on besides its tensors: changes when the radius does."""
        return tuple(self._radius_of(name)[0] for name in list(radius_names(self.radius)) or [INPUT])

    def of(self, model: nn.Module) -> PersistentExcitation:
        """The same excitation, as far advanced, of another model."""
        other = copy.copy(self)
        other.model, other._known_layouts = model, {}
        return other

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep."""
        return {"progress": self.progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.advance(state["progress"])

    def __repr__(self) -> str:
        return (
            f"PersistentExcitation(radius={self.radius!r}, norm={self.norm!r}, steps={self.steps}, layers={self.layers!r}, "
            f"threshold={self.threshold}, progress={self.progress})"
        )

    # -- inside --------------------------------------------------------------------------------------------------
    def _radius_of(self, layer: str) -> tuple[float, bool]:
        return radius_of(
            self.radius, layer.split("#")[0] if layer not in radius_names(self.radius) else layer, self.progress
        )

    def _perturbs(self) -> bool:
        """Whether anything is perturbed now: not at radius 0, nor in the first of `Stages`."""
        return any(self.setting())

    def _search(self, x: Batch) -> Perturbations:
        model = unwrap(self.model)
        wanted = self.layers
        setting = Setting(
            radius=self._radius_of,
            norm=self.norm,
            steps=self.steps,
            chosen=lambda name: (
                wanted == "all" or (wanted != "input" and (name in wanted or name.split("#")[0] in wanted))
            ),
            at_input=wanted == "input",
            bounds=self.bounds,
            output=self.output,
        )
        return search(model, Names(model), x, setting, self._known_layouts)

    def _extremes(self, x: Batch) -> tuple[Tensor, Tensor]:
        return evaluate(self.model, Names(unwrap(self.model)), x, self._search(x), self.output)

    def _check_names(self, known: list[str]) -> None:
        wanted = [] if isinstance(self.layers, str) else list(self.layers)
        for name in [*radius_names(self.radius), *wanted]:
            if name not in known and name.split("#")[0] not in known:
                raise unknown_layer(name, known)

    def _check_input(self, x: Batch) -> None:
        if capturing():  # the same call was checked before it was captured
            return
        check_finite(x)
        if self.layers == "input" and not (isinstance(x, Tensor) and x.is_floating_point()):
            kind = f"{x.dtype} values" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InputError(
                f"layers='input' needs a tensor of floating-point numbers to perturb; got {kind}: choose layers='all'"
            )
        if self.bounds is None:
            return
        first = tensors(x)[0]
        low, high = (torch.as_tensor(b, dtype=first.dtype, device=first.device) for b in self.bounds)
        try:
            outside = bool((first < low).any()) or bool((first > high).any())
        except RuntimeError as error:
            raise InputError(
                f"bounds: shapes {tuple(low.shape)} and {tuple(high.shape)} do not broadcast to inputs of shape {tuple(first.shape)}"
            ) from error
        if outside:
            raise InputError(
                f"expected inputs within bounds {self.bounds}; got values from {float(first.min()):g} to "
                f"{float(first.max()):g}: scale the data or change the bounds"
            )

    def _targets(self, y: Tensor, batch: int) -> Tensor:
        if not isinstance(y, Tensor):
            raise InputError(f"labels: expected a tensor of 0 and 1; got {type(y).__name__}")
        if y.shape not in ((batch,), (batch, 1)):
            raise InputError(
                f"labels: expected shape ({batch},) or ({batch}, 1) for {batch} inputs; got {tuple(y.shape)}"
            )
        y = y.reshape(batch).detach()
        if not capturing() and not bool(((y == 0) | (y == 1)).all()):
            odd = y[(y != 0) & (y != 1)][0].item()
            raise InputError(f"labels: expected 0 and 1; got {odd}: map the two classes to 0 and 1")
        return y


def _check_layers(layers: object) -> str | tuple[str, ...]:
    if isinstance(layers, str):
        if layers not in ("all", "input"):
            raise InputError(f"layers: expected 'all', 'input' or a list of layer names; got {layers!r}")
        return layers
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(name, str) for name in layers):
        raise InputError(f"layers: expected 'all', 'input' or a list of at least one layer name; got {layers!r}")
    return tuple(layers)


def _check_bounds(bounds: object) -> Bounds | None:
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise InputError(f"bounds: expected (low, high); got {bounds!r}")
    low, high = bounds
    if not all(isinstance(b, Tensor | int | float) for b in bounds):
        raise InputError(f"bounds: expected numbers or tensors; got {bounds!r}")
    if not bool((torch.as_tensor(low) < torch.as_tensor(high)).all()):
        raise InputError(f"bounds: expected low < high; got {bounds!r}")
    return low, high


def _possible_layers(model: nn.Module) -> list[str]:
    """Names that affine calls of this model can have: paths of weights, and of modules whose weight is computed."""
    refuse_lazy(model)
    names = Names(model)
    weights = [names.layer(p) for p in model.parameters() if p.dim() > 1]
    computed = [path for path, module in model.named_modules() if path and hasattr(module, "parametrizations")]
    if not weights and not computed:
        raise ModelError(
            "the model has no affine layer (linear, convolution or product with a parameter): nothing to excite"
        )
    return list(dict.fromkeys([*weights, *computed]))
