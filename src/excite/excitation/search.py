"""Find the perturbations that make a scalar output largest and smallest, both at once.

f(x; d) is the model with d_k added to the input of affine call k (equation 15 of the paper). At d = 0 the gradients for
argmax and argmin are equal up to sign, so the first step of both searches costs one backward pass of the clean batch;
the later steps run on the batch twice in a row, the first half going up and the second half going down. No step needs
gradients for the weights, and every step frees its graph before the next, so memory does not grow with `steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.excitation.layout import Layout
from excite.excitation.radius import root_mean_square
from excite.excitation.replay import Pass, Tape
from excite.excitation.steepest import steepest
from excite.norms import Norm
from excite.wiring.affine import AffineCall, Names
from excite.wiring.calling import Batch, Pick, batch_size, call, doubled, own_copy, pick_output, tensors
from excite.wiring.untouched import Buffers, RandomState, device_of
from excite.wiring.wrappers import eagerly

INPUT = ""  # the name of the perturbation of the model's own input; no layer has it
Bounds = tuple[float | Tensor, float | Tensor]


@dataclass(frozen=True)
class Setting:
    """What is searched: the ball of `norm` and of `radius(layer)` around the input of each chosen affine call."""

    radius: Callable[[str], tuple[float, bool]]  # layer -> (number, whether relative to the layer's input)
    norm: Norm
    steps: int
    chosen: Callable[[str], bool]  # layer -> whether it is perturbed
    at_input: bool = False  # perturb the model's own input instead
    bounds: Bounds | None = None  # on the model's own input
    output: Pick = None


@dataclass(frozen=True)
class Site:
    """One place where a perturbation enters: where the batch lies in the signal there, its radius, and its bounds.

    The clean signal is kept only where there are bounds, which need it.
    """

    layout: Layout
    radius: float | Tensor
    bounds: Bounds | None
    clean: Tensor | None

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        moved = signal + perturbation
        if self.bounds is not None:
            # Rounding may lead out of the bounds by one unit; put the value right without changing the gradient.
            moved = moved + (moved.detach().clamp(*self.bounds) - moved.detach())  # type: ignore[arg-type]
        return moved.to(signal.dtype)

    def step(self, at: Tensor | None, gradient: Tensor, setting: Setting, batch: int) -> Tensor:
        """The perturbation after one steepest step of length radius/steps up the gradient; `at` None: the first step.

        `steps` of them from zero cannot leave the ball of `radius`, so there is nothing to project but onto the bounds.
        """
        signal = self.clean
        if signal is not None and at is not None:
            signal = self.layout.join(signal, signal)
        if signal is not None and self.bounds is not None:
            low, high = self.bounds
            here = signal if at is None else signal + at
            stuck = ((here >= high) & (gradient > 0)) | ((here <= low) & (gradient < 0))
            gradient = gradient.masked_fill(stuck, 0)
        samples = batch if at is None else 2 * batch
        # In the precision of the signal it is added to: a wider one would be rounded away, and costs twice the memory.
        step = (steepest(gradient, setting.norm, self.layout, samples) * (self.radius / setting.steps)).to(
            gradient.dtype
        )
        after = step if at is None else at + step
        if signal is None or self.bounds is None:
            return after
        return (signal + after).clamp(*self.bounds) - signal  # type: ignore[arg-type]


@dataclass(frozen=True)
class Perturbations:
    """Perturbations of the doubled batch by layer: the first half for the maximum, the second for the minimum."""

    values: dict[str, Tensor]
    sites: dict[str, Site]
    tape: Tape
    chosen: frozenset[str]

    def halves(self, layer: str) -> tuple[Tensor, Tensor]:
        """(for the minimum, for the maximum) at one layer, each of the size of that layer's clean input."""
        high, low = self.sites[layer].layout.split(self.values[layer])
        return low, high


class _CleanPass(Pass):
    """Records, and hands out an alias of every chosen input: its gradient is that of the perturbation at zero."""

    def __init__(self, names: Names, tape: Tape, setting: Setting, x: Batch):
        super().__init__(names, tape, record=True)
        self._setting, self._x = setting, x
        self.seen: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.site_number: dict[str, int] = {}
        self.on_x: set[str] = set()

    def affine(self, call: AffineCall) -> Tensor:
        self.seen.append(call.name)
        input = call.input
        # Where gradients are off (a frozen backbone under no_grad) there is nothing to search.
        if self._setting.chosen(call.name) and input.is_floating_point() and torch.is_grad_enabled():
            self.site_number[call.name] = len(self.tape.shapes)
            self.site(input, call.name)
            if self._setting.bounds is not None and is_whole(input, self._x):
                self.on_x.add(call.name)
            # A node of its own, because other users of this signal (a skip connection) must not be counted.
            input = input.view_as(input) if input.requires_grad else input.detach().requires_grad_()
            self.inputs[call.name] = input
        return call.run(input, frozen=True)


class _PerturbedPass(Pass):
    """Adds the perturbations on the doubled batch."""

    def __init__(
        self,
        names: Names,
        found: Perturbations,
        *,
        frozen: bool = False,
        live_norm: bool = False,
        calibrate: bool = False,
    ):
        super().__init__(names, found.tape, live_norm=live_norm, calibrate=calibrate)
        self._at, self._frozen = found, frozen

    def affine(self, call: AffineCall) -> Tensor:
        input, found = call.input, self._at
        if call.name in found.chosen:
            self.site(input, call.name)
            if call.name in found.values:
                input = found.sites[call.name].moved(input, found.values[call.name])
        return call.run(input, frozen=self._frozen)


def search(
    model: nn.Module, names: Names, x: Batch, setting: Setting, known_layouts: dict[object, list[Layout | None]]
) -> Perturbations:
    """argmax and argmin of the model's output over the perturbations: the last iterate, as the paper has it.

    The model is left as it was, except that the random state moves as in one ordinary forward of `x`.
    `known_layouts` remembers, by the shapes met, where the batch lies inside the model.
    """
    batch, tape, buffers = batch_size(x), Tape(batch_size(x)), Buffers(model)
    try:
        with torch.inference_mode(False), torch.enable_grad(), eagerly(model):
            found, gradients = _first_gradients(model, names, x, setting, tape, buffers, known_layouts)
            values = {}
            for name in list(gradients):
                site, gradient = found.sites[name], gradients.pop(name)
                up = site.step(None, gradient, setting, batch)
                down = -up if site.bounds is None else site.step(None, -gradient, setting, batch)
                values[name] = site.layout.join(up, down)
            for _ in range(setting.steps - 1):
                leaves = {name: value.requires_grad_() for name, value in values.items()}
                at = Perturbations(leaves, found.sites, tape, found.chosen)
                repeated = _PerturbedPass(names, at, frozen=True)
                with repeated:
                    output = scalar(pick_output(call(model, _enter(doubled(x), at)), setting.output), 2 * batch)
                repeated.finish()
                buffers.restore(thorough=False)
                objective = output[:batch].sum() - output[batch:].sum()
                gradients_now = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
                values = {
                    name: leaf.detach() if g is None else found.sites[name].step(leaf.detach(), g, setting, batch)
                    for (name, leaf), g in zip(leaves.items(), gradients_now)
                }
    finally:
        buffers.restore(thorough=False)
        tape.rewind()
    return Perturbations(values, found.sites, tape, found.chosen)


def evaluate(model: nn.Module, names: Names, x: Batch, found: Perturbations, output: Pick) -> tuple[Tensor, Tensor]:
    """(low, high): the outputs at the two perturbations, (B,) each, from one forward of the doubled batch.

    An ordinary forward but for the perturbations and the dropout masks of the clean pass: differentiable in the
    weights, batch normalization takes the statistics of the doubled batch and updates its running ones.
    """
    batch = found.tape.batch
    try:
        repeated = _PerturbedPass(names, found, live_norm=True)
        with eagerly(model), repeated:
            both = scalar(pick_output(call(model, _enter(doubled(x), found)), output), 2 * batch)
        repeated.finish()
    finally:
        found.tape.rewind()
    return both[batch:], both[:batch]


def scalar(output: Tensor, batch: int) -> Tensor:
    """A scalar output per sample as (B,); anything else is refused."""
    if output.shape == (batch,):
        return output
    if output.shape == (batch, 1):
        return output.squeeze(1)
    if output.dim() and output.shape[0] != batch:
        raise ModelError(
            f"expected one output per sample, ({batch},) or ({batch}, 1); the model returned {tuple(output.shape)}"
        )
    raise ModelError(
        f"expected a scalar output per sample, ({batch},) or ({batch}, 1); the model returned {tuple(output.shape)}: "
        "give the model one output, or pick one with output="
    )


def _first_gradients(
    model: nn.Module,
    names: Names,
    x: Batch,
    setting: Setting,
    tape: Tape,
    buffers: Buffers,
    known_layouts: dict[object, list[Layout | None]],
) -> tuple[Perturbations, dict[str, Tensor]]:
    """The clean pass: sites, tape, and the gradient of the output with respect to the perturbations at zero."""
    random = torch.get_rng_state()
    entering = own_copy(x)
    leaf = entering.requires_grad_() if setting.at_input and isinstance(entering, Tensor) else None
    clean = _CleanPass(names, tape, setting, entering)
    with clean:
        # Not the leaf itself, so that a model may change its input in place.
        returned = call(model, entering if leaf is None else leaf.clone())
    output = scalar(pick_output(returned, setting.output), tape.batch)
    buffers.restore(thorough=False)
    tape.after = RandomState(device_of(model)) if tape.random else None
    if not tape.random and not torch.equal(random, torch.get_rng_state()):
        raise ModelError(
            "the model draws random numbers in a way that cannot be repeated: use torch's own functions for them"
        )
    if not clean.seen:
        raise ModelError(
            "the model has no affine layer (linear, convolution or product with a parameter): nothing to excite"
        )
    inputs = clean.inputs if leaf is None else {INPUT: leaf}
    if not inputs:
        raise ModelError(
            f"none of the chosen layers has an input that can be perturbed; affine layers: {', '.join(clean.seen)}"
        )
    known = list(inputs.items())
    gradients = _gradients(output, [tensor for _, tensor in known])
    layouts = {INPUT: Layout()} if setting.at_input else _layouts(model, names, x, clean, known_layouts, setting)
    buffers.restore(thorough=False)
    tape.sites.clear()
    sites, kept = {}, {}
    for (name, signal), gradient in zip(known, gradients):
        number, relative = setting.radius(name)
        layout = layouts[name]
        if gradient is None or number == 0 or layout is None:
            continue  # no influence on the output, not perturbed, or a signal that all samples share
        radius = number * root_mean_square(signal) if relative else number
        bounds = _shaped(setting.bounds, signal, x) if name == INPUT or name in clean.on_x else None
        sites[name] = Site(layout, radius, bounds, signal.detach() if bounds is not None else None)
        kept[name] = gradient
    if not sites:
        raise InputError(
            "nothing would be perturbed: no chosen layer has a radius above 0 and an influence on the output; "
            f"affine layers: {', '.join(clean.seen)}"
        )
    return Perturbations({}, sites, tape, frozenset(clean.inputs)), kept


def _gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not output.requires_grad:
        raise ModelError(
            "the model's output has no gradient path to its layers (a detach, no_grad, argmax or rounding?)"
        )
    gradients = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
    if all(g is None for g in gradients):
        raise ModelError(
            "no gradient path leads from the chosen layers to the model's output (a detach or no_grad between?)"
        )
    return gradients


def _layouts(
    model: nn.Module,
    names: Names,
    x: Batch,
    clean: _CleanPass,
    known: dict[object, list[Layout | None]],
    setting: Setting,
) -> dict[str, Layout | None]:
    """Where the batch lies at every site; found once for each combination of shapes by one more forward pass."""
    tape = clean.tape
    key = (tape.batch, tuple(tape.shapes))
    if key not in known:
        nothing = Perturbations({}, {}, tape, frozenset(clean.inputs))
        calibration = _PerturbedPass(names, nothing, frozen=True, calibrate=True)
        with torch.no_grad(), calibration:
            call(model, doubled(x))
        calibration.finish()
        known[key] = calibration.layouts
    tape.layouts = known[key]
    return {name: tape.layouts[number] for name, number in clean.site_number.items()}


def _enter(twice: Batch, found: Perturbations) -> Batch:
    if INPUT not in found.values or not isinstance(twice, Tensor):
        return twice
    return found.sites[INPUT].moved(twice, found.values[INPUT])


def is_whole(input: Tensor, x: Batch) -> bool:
    """Whether a layer's input is the model's own input, perhaps flattened or copied: bounds on x hold there too."""
    first = tensors(x)[0]
    if input.dtype != first.dtype or input.numel() != first.numel():
        return False
    same_memory = input.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    return same_memory or bool(torch.equal(input.detach().reshape(-1), first.detach().reshape(-1)))


def _shaped(bounds: Bounds | None, signal: Tensor, x: Batch) -> Bounds | None:
    """Bounds that broadcast against the layer's input and against its doubled version."""
    if bounds is None or not any(isinstance(b, Tensor) for b in bounds):
        return bounds
    x = tensors(x)[0]
    try:
        low, high = (torch.as_tensor(b, dtype=x.dtype, device=x.device).expand(1, *x.shape[1:]) for b in bounds)
    except RuntimeError as error:
        shapes = " and ".join(str(tuple(torch.as_tensor(b).shape)) for b in bounds)
        raise InputError(
            f"bounds: shapes {shapes} do not broadcast to one input of shape {tuple(x.shape[1:])}"
        ) from error
    if signal.shape != x.shape:
        if signal.shape[0] != x.shape[0]:
            raise InputError("bounds given as tensors need a first layer that reads the input with the batch in front")
        low, high = (b.reshape(1, *signal.shape[1:]) for b in (low, high))
    return low, high
