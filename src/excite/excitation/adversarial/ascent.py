"""Find the perturbation that makes the error of each sample largest: of the input, and of hidden layers at the same time.

All signals move together: one forward and one backward pass of the batch per step give the gradient of every sample's
error with respect to the model's input and to the input of every chosen affine call. The model's input takes steps of a
fixed length, each followed by a projection onto its ball and onto the bounds (PGD). A hidden layer k with input h takes
`steps` steepest steps of length ρ·size(h)/steps from zero, which cannot leave the ball of radius ρ·size(h).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, batch_size, own_copy
from excite._core.checks import Bounds, Norm, check_choice, check_flag, check_number, parse_norm
from excite._core.intercept.affine import Names
from excite._core.layout import Layout
from excite._core.preserve import Buffers, ignore_probes
from excite._core.replay.passes import Tape
from excite._core.wrappers import eagerly
from excite.errors import InputError
from excite.excitation.perturbations import BestValues, PerturbedInput
from excite.excitation.radius import root_mean_square
from excite.excitation.search import (
    INPUT,
    Perturbations,
    Read,
    SearchSettings,
    find_layouts,
    gradients_of,
    record,
    repeat,
)

Errors = Callable[[Tensor], Tensor]  # outputs (B, ...) -> the error of each sample, (B,)


@dataclass(frozen=True)
class HiddenOptions:
    """Rarely used settings of the hidden layers' perturbations in `AdversarialTraining`.

    Args:
        norm: "inf": each entry moves by at most ρ times the root mean square of the layer's input h over the batch; "2": each
            sample's perturbation has at most the 2-norm ρ times the root mean square of ‖h‖₂ over samples.
        budget: "layer", a ball per layer; or "shared", one for all layers of a sample together, Σ (‖d_k‖₂ / (ρ_k ‖h_k‖₂))² ≤ 1
            (norm "2" only), as in all-layer margin optimization.
        random_start: Start uniformly in each ball instead of at zero; steps are then as long as those of the input, and
            projected (budget "layer" only).
        fraction: Fraction of the samples of each batch whose hidden layers are perturbed: those with the smallest error where
            the search begins.
        once: Move hidden layers in the last step of the search alone, to the edge of their balls: earlier steps move the input,
            at the cost of adversarial training (without random starts only).

    Raises:
        InputError: If a setting is unknown or out of range, or a shared budget has another norm than "2".

    Example:
        >>> excite.AdversarialTraining(model, radius=0.1, hidden_radius=0.01, hidden=HiddenOptions(norm="2"))
    """

    norm: str | float = "inf"
    budget: Literal["layer", "shared"] = "layer"
    random_start: bool = False
    fraction: float = 1.0
    once: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", parse_norm(self.norm))
        check_choice(self.budget, "budget", ("layer", "shared"))
        check_flag(self.random_start, "random_start")
        check_number(self.fraction, "fraction", 0, 1, above=True)
        check_flag(self.once, "once")
        if self.once and self.random_start:
            raise InputError("HiddenOptions: once needs random_start=False")
        if self.norm == "1":
            raise InputError("HiddenOptions: expected norm 'inf' or '2'; got '1'")
        if self.budget == "shared" and (self.norm != "2" or self.random_start):
            raise InputError("HiddenOptions: a shared budget needs norm='2' and random_start=False")


@dataclass(frozen=True)
class AscentSettings:
    """The sets of perturbations, and the steps taken in them."""

    radius: float  # of the model's input
    norm: Norm
    steps: int
    step_size: float
    bounds: Bounds | None
    read: Read
    hidden_radius: Callable[[str], float | Tensor] = lambda layer: 0.0  # ρ of each layer; 0: not perturbed
    hidden: HiddenOptions = HiddenOptions()
    skip_input: bool = False  # leave out layers whose input is the model's own input
    record_clean: bool = False  # the recording pass runs at the clean batch instead of the start
    keep_best: bool = False  # the iterate with the largest error of each sample instead of the last one
    size: Callable[[Tensor], Tensor] = root_mean_square  # of a layer's input
    outputs: Collection[str] = ()  # names of modules' outputs that are perturbed, "PATH:output"
    tokens: int = 1  # of each sample: every one has a ball of its own
    where: Tensor | None = None  # (B, tokens): which tokens are perturbed; None: all
    taken: int | None = None  # how many of the steps `ascend` takes; None: all

    def sites(self, at_input: bool) -> SearchSettings:
        """Which signals the recording pass prepares."""
        return SearchSettings(
            radius=lambda layer: (self.hidden_radius(layer), True),
            norm=self.norm,
            steps=self.steps,
            chosen=lambda layer: _perturbed(self.hidden_radius(layer)),
            read=self.read,
            at_input=at_input,
            skip_input=self.skip_input,
        )


def ascend(
    model: nn.Module,
    x: Batch,
    start: Tensor | None,
    objective: Callable[[Tensor], Errors],
    settings: AscentSettings,
    known_layouts: dict[object, list[Layout | None]],
) -> Perturbations:
    """Perturbations of the input and of hidden layers, up the error of each sample.

    One recording pass fixes dropout masks and batch statistics for all steps. The model is left as it was, except that the
    random state moves as in one ordinary forward of `x`.

    Args:
        model: The unwrapped model.
        x: The batch.
        start: The first perturbation of the input; None where it is not perturbed, as token ids.
        objective: From the outputs of the recording pass to the error of each sample that is to be made large.
        settings: Balls and steps.
        known_layouts: Remembers, by the shapes met, where the batch lies inside the model.

    Returns:
        One perturbation for each sample and signal.
    """
    names, tape, buffers = Names(model, settings.outputs), Tape(batch_size(x)), Buffers(model)
    x = x.detach() if isinstance(x, Tensor) else x
    retained = x if isinstance(x, Tensor) and settings.bounds is not None else None
    at_input = PerturbedInput(Layout(), settings.radius, settings.bounds, retained)

    def outputs(values: Mapping[str, Tensor]) -> Tensor:
        return repeat(model, own_copy(x), replace(at, values=dict(values)), settings.read, buffers, copies=1)

    try:
        with ignore_probes(), torch.inference_mode(False), torch.enable_grad(), eagerly(model):
            start = None if start is None else at_input.within_bounds(start)
            moves = isinstance(x, Tensor) and start is not None and not settings.record_clean
            recorded_at = at_input.moved(x, start) if moves else x  # type: ignore[arg-type]
            clean = record(model, names, recorded_at, settings.sites(start is not None), tape, buffers)
            errors = objective(clean.output.detach())
            error = errors(clean.output)
            gradients = gradients_of(error.sum(), clean.inputs)
            layouts = find_layouts(model, names, recorded_at, clean.made_by, settings.read, known_layouts)
            buffers.restore(thorough=False)
            tape.sites.clear()
            layers = ({} if start is None else {INPUT: at_input}) | _hidden_balls(
                clean.inputs, gradients, layouts, _where_errors_are_small(settings, error.detach()), tape.batch
            )
            if not layers:
                raise InputError(
                    "nothing would be perturbed: no chosen layer depends on the sample and has an influence on the output"
                )
            at = Perturbations({}, layers, names, tape, frozenset(clean.made_by.inputs))
            ascent = Ascent(settings, layers, tape.batch)
            values = ({} if start is None else {INPUT: start}) | ascent.hidden_start(clean.inputs)
            del clean
            values = _climb(values, ascent, lambda values: errors(outputs(values)), error, gradients)
    finally:
        buffers.restore(thorough=False)
        tape.rewind()
    return replace(at, values=values)


def _climb(
    values: dict[str, Tensor],
    ascent: Ascent,
    errors_at: Callable[[Mapping[str, Tensor]], Tensor],
    error: Tensor,
    gradients: dict[str, Tensor | None],
) -> dict[str, Tensor]:
    """The steps from `values`; `error` and `gradients` are those of the recording pass."""
    settings = ascent.settings
    layouts = {name: layer.layout for name, layer in ascent.layers.items()}
    best = BestValues(layouts, ascent.batch) if settings.keep_best else None
    for step in range(settings.steps if settings.taken is None else settings.taken):
        wait = settings.hidden.once and step < settings.steps - 1  # hidden layers wait for the last step
        moving = [name for name in values if name == INPUT or not wait]
        if not moving:
            continue
        if step or settings.record_clean or settings.hidden.random_start:  # the recording pass was not at these values
            leaves = {name: values[name].requires_grad_() for name in moving}
            error = errors_at(values)
            gradients = gradients_of(error.sum(), leaves)
            values = {name: value.detach() for name, value in values.items()}
        if best is not None:
            best.update(values, error.detach())
        for name in [name for name in gradients if name not in moving]:
            del gradients[name]
        values = ascent.step(values, gradients)
    if best is None:
        return values
    with torch.no_grad():
        best.update(values, errors_at(values))
    return best.values


def _hidden_balls(
    inputs: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    layouts: Mapping[str, Layout | None],
    settings: AscentSettings,
    batch: int,
) -> dict[str, PerturbedInput]:
    """The ball of each hidden layer that influences the error and whose input depends on the sample."""
    balls = {}
    for name, signal in inputs.items():
        layout = layouts[name]
        if name == INPUT or gradients[name] is None or layout is None:
            continue
        if settings.tokens > 1:
            layout = layout.by_token(signal.shape, batch, settings.tokens, name)
        size = settings.size(signal)
        if settings.hidden.norm == "2":  # the root mean square of ‖h‖₂ over samples, or over tokens
            size = size * (signal.numel() / (batch * settings.tokens)) ** 0.5
        radius = settings.hidden_radius(name) * size
        balls[name] = PerturbedInput(layout, radius, None, None, allowed=settings.where)
    return balls


def _where_errors_are_small(settings: AscentSettings, error: Tensor) -> AscentSettings:
    """The settings that perturb the hidden layers of `HiddenOptions.fraction` of the samples."""
    if settings.hidden.fraction == 1:
        return settings
    few = max(1, round(settings.hidden.fraction * len(error)))
    small = (error <= error.kthvalue(few).values)[:, None].expand(-1, settings.tokens)
    return replace(settings, where=small if settings.where is None else small & settings.where)


class Ascent:
    """Steps of all signals together."""

    def __init__(self, settings: AscentSettings, layers: Mapping[str, PerturbedInput], batch: int):
        self.settings, self.layers, self.batch = settings, layers, batch
        self._hidden = [name for name in layers if name != INPUT]
        self._hidden_steps = 1 if settings.hidden.once else settings.steps

    def hidden_start(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zero, or a point drawn uniformly from each ball."""
        start = {name: torch.zeros_like(inputs[name]).detach() for name in self._hidden}
        if self.settings.hidden.random_start:
            for name, zero in start.items():
                start[name] = self.layers[name].random(zero, self._norm(name), self.batch)
        return start

    def step(self, values: Mapping[str, Tensor], gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """The perturbations after one step up the gradients; those without a gradient stay.

        Hidden ones are changed in place and `gradients` is emptied, so that no second set of activations is held.
        """
        shared = self.settings.hidden.budget == "shared" and any(name in gradients for name in self._hidden)
        moved = self._shared_step(values, gradients) if shared else {}
        for name, value in values.items():
            gradient = gradients.pop(name, None)
            if name in moved:
                continue
            moved[name] = value if gradient is None else self._step(name, value, gradient)
        return moved

    def _norm(self, name: str) -> Norm:
        return self.settings.norm if name == INPUT else self.settings.hidden.norm  # type: ignore[return-value]

    def _step(self, name: str, value: Tensor, gradient: Tensor) -> Tensor:
        layer, norm, settings = self.layers[name], self._norm(name), self.settings
        if name != INPUT and not settings.hidden.random_start:  # these steps cannot leave the ball
            unit, length = layer.steepest(None, gradient, norm, self.batch), layer.radius / self._hidden_steps
            if isinstance(length, Tensor):
                return value.addcmul_(unit.to(value.dtype), length.to(value.dtype))
            return value.add_(unit.to(value.dtype), alpha=length)
        length = settings.step_size if name == INPUT else 2.5 * layer.radius / settings.steps
        return layer.projected_step(value, gradient, norm, length, self.batch)

    def _shared_step(self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The steepest step under Σ (‖d_k‖₂/r_k)² ≤ 1/steps²: d_k = r_k² g_k / (steps · √(Σ r_j² ‖g_j‖²)), per sample."""
        scaled = {}
        for name in self._hidden:
            gradient, layer = gradients[name], self.layers[name]
            if gradient is not None:
                rows = layer.layout.rows(layer.at_allowed(gradient, self.batch), self.batch)
                scaled[name] = rows.to(torch.promote_types(rows.dtype, torch.float32)) * layer.radius
        lengths = torch.stack([rows.norm(dim=1) for rows in scaled.values()])
        total = lengths.norm(dim=0)[:, None] * self._hidden_steps
        moved = {}
        for name, rows in scaled.items():
            layer, value = self.layers[name], values[name]
            step = rows * layer.radius / torch.where(total > 0, total, 1)
            moved[name] = value + layer.layout.from_rows(step, value).to(value.dtype)
        return moved


def _perturbed(radius: float | Tensor) -> bool:
    return isinstance(radius, Tensor) or radius > 0
