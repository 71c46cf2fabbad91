"""Find the perturbations that make an output largest and smallest, both at once.

f(x; d) is the model with d_k added to the input of affine call k (equation 15 of the paper), or multiplied into it. At
d = 0 the gradients for argmax and argmin are equal up to sign, so the first step of both searches costs one backward pass
of the clean batch; the later steps run on the batch twice in a row, the first half going up and the second half going
down. No step needs gradients for the weights, and every step frees its graph before the next, so memory does not grow
with `steps`. Several outputs are searched along one direction for each sample, v'f, which is found first (`direction`).
From a random start both searches have gradients of their own from the first step on, and every step is projected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, batch_size, call, own_copy, repeated, tensors
from excite._core.checks import Bounds, Norm
from excite._core.distributed import anyone
from excite._core.intercept.affine import Names
from excite._core.intercept.parameters import account, report
from excite._core.layout import Layout
from excite._core.preserve import Buffers, RandomState, device_of, ignore_probes
from excite._core.replay.calibration import resolve_layouts
from excite._core.replay.passes import CleanPass, Pass, PerturbedPass, Tape
from excite._core.wrappers import eagerly, is_sharded
from excite.errors import InputError, ModelError
from excite.excitation.direction import Linearized, any_direction, find_direction, wide
from excite.excitation.perturbations import MODES, BestValues, PerturbationMode, PerturbedInput
from excite.excitation.radius import root_mean_square

INPUT = ""  # the name of the perturbation of the model's own input; no layer has it
Read = Callable[[Any, int], Tensor]  # (what the model returned, samples) -> outputs (B,) or (B, k)


@dataclass(frozen=True)
class SearchSettings:
    """The search region and its settings: the ball of `norm` and of `radius(layer)` around the input of each chosen affine call."""

    radius: Callable[[str], tuple[float | Tensor, bool]]  # layer -> (number, whether relative to the layer's input)
    norm: Norm
    steps: int
    chosen: Callable[[str], bool]  # layer -> whether it is perturbed
    read: Read
    everything: bool = False  # whether all affine calls are chosen
    at_input: bool = False  # perturb the model's own input; alone, unless layers are chosen
    skip_input: bool = False  # of the chosen layers, leave out those whose input is the model's own input
    bounds: Bounds | None = None  # on the model's own input
    mode: PerturbationMode = MODES["additive"]
    start: Callable[[Tensor], Tensor] = any_direction  # outputs (B, k) -> where the search for the direction begins
    alternations: int = 0  # of that search, where there are several outputs and no direction is given
    starts: int = 1  # of that search; the direction that moves the outputs of a sample most is kept
    random_start: bool = False  # begin uniformly in the balls instead of at zero; steps are then longer, and projected
    keep_best: bool = False  # the best iterate of each sample instead of the last one
    size: Callable[[Tensor], Tensor] = root_mean_square  # of a layer's input, for radii relative to it
    tokens: int = 1  # of each sample: every one has a ball of its own
    where: Tensor | None = None  # (B, tokens): which tokens are perturbed; None: all


@dataclass(frozen=True)
class Perturbations:
    """Perturbations by layer. Of the doubled batch: the first half for the maximum, the second for the minimum.

    `layers` has the sets they lie in, `registered` the calls whose inputs are sites of the tape.
    """

    values: dict[str, Tensor]
    layers: dict[str, PerturbedInput]
    names: Names
    tape: Tape
    registered: frozenset[str]

    def halves(self, layer: str) -> tuple[Tensor, Tensor]:
        """(for the minimum, for the maximum) at one layer, each of the size of that layer's clean input."""
        high, low = self.layers[layer].layout.split(self.values[layer])
        return low, high

    def run(self, model: nn.Module, x: Batch, *, frozen: bool = False, live_norm: bool = False, copies: int = 2) -> Any:
        """The model's output for the batch x, `copies` times in a row, under the perturbations."""
        if copies > 1:
            x = repeated(x, copies, self.tape.batch)
        moves = {name: partial(self.layers[name].moved, perturbation=d) for name, d in self.values.items()}
        if INPUT in moves and isinstance(x, Tensor):
            x = moves[INPUT](x)
        perturbed = PerturbedPass(
            self.names, self.tape, self.registered, moves, frozen=frozen, live_norm=live_norm, copies=copies
        )
        with perturbed:
            returned = call(model, x)
        perturbed.finish()
        return returned


def search(
    model: nn.Module,
    names: Names,
    x: Batch,
    settings: SearchSettings,
    known_layouts: dict[object, list[Layout | None]],
    direction: Tensor | None = None,
) -> Perturbations:
    """argmax and argmin of the model's output over the perturbations: the last iterate, as the paper has it, or the best.

    Of several outputs, (B, k), what is searched is v'f with v the rows of `direction`; by default the direction in which
    f can be moved most. The model is left as it was, except that the random state moves as in one ordinary forward of `x`,
    and further where random starts are drawn. `known_layouts` remembers, by the shapes met, where the batch lies inside the
    model.
    """
    tape, buffers = Tape(batch_size(x)), Buffers(model)
    try:
        with ignore_probes(), torch.inference_mode(False), torch.enable_grad(), eagerly(model):
            clean = record(model, names, x, settings, tape, buffers)
            start, slopes, v = _first_gradients(model, names, x, settings, clean, buffers, known_layouts, direction)
            objective = along(clean.output.detach(), v)
            del clean

            def outputs(values: dict[str, Tensor]) -> Tensor:
                perturbed = replace(start, values=values)
                return repeat(model, x, perturbed, settings.read, buffers)

            values = _climb(start.layers, slopes, v, objective, settings, outputs, tape)
    finally:
        buffers.restore(thorough=False)
        tape.rewind()
    return replace(start, values=values)


def _climb(
    layers: dict[str, PerturbedInput],
    slopes: dict[str, Tensor],
    v: Tensor | None,
    clean: Tensor,
    settings: SearchSettings,
    outputs: Callable[[dict[str, Tensor]], Tensor],
    tape: Tape,
) -> dict[str, Tensor]:
    """All steps of both searches.

    `slopes` are the gradients at zero, `clean` (B,) is v'f there and `outputs` the model on the doubled batch.
    """
    batch, norm, steps = tape.batch, settings.norm, settings.steps
    names = list(slopes)
    values = {name: layers[name].first_step(slopes.pop(name), norm, steps, batch) for name in names}
    best = BestValues({name: layer.layout for name, layer in layers.items()}, 2 * batch) if settings.keep_best else None
    if settings.random_start:
        values = {name: layers[name].random(value, norm, 2 * batch) for name, value in values.items()}
        if tape.after is not None:  # the numbers drawn here are not drawn again
            tape.after = RandomState(clean.device)
    elif best is not None:
        best.update({name: torch.zeros_like(value) for name, value in values.items()}, torch.cat([clean, -clean]))
    length = 2.5 / steps if steps > 1 else 1.25  # times the radius, from a random start
    for _ in range(steps if settings.random_start else steps - 1):
        leaves = {name: value.requires_grad_() for name, value in values.items()}
        up, down = (along(half, v) for half in outputs(leaves).split(batch))
        if best is not None:
            best.update({name: leaf.detach() for name, leaf in leaves.items()}, torch.cat([up, -down]).detach())
        gradients = torch.autograd.grad(up.sum() - down.sum(), list(leaves.values()), allow_unused=True)
        values = {}
        for (name, leaf), gradient in zip(leaves.items(), gradients):
            values[name] = at = leaf.detach()
            if gradient is not None and settings.random_start:
                values[name] = layers[name].projected_step(at, gradient, norm, length * layers[name].radius, 2 * batch)
            elif gradient is not None:
                values[name] = layers[name].step(at, gradient, norm, steps, 2 * batch)
    if best is None:
        return values
    with torch.no_grad():
        up, down = (along(half, v) for half in outputs(values).split(batch))
        best.update(values, torch.cat([up, -down]))
    return best.values


def evaluate(model: nn.Module, x: Batch, perturbations: Perturbations, read: Read, copies: int = 2) -> Tensor:
    """The outputs at the perturbations, from one forward: of the doubled batch, or of one copy of the batch.

    An ordinary forward but for the perturbations and the dropout masks of the clean pass: differentiable in the
    weights, batch normalization takes the statistics of this batch and updates its running ones.
    """
    tape = perturbations.tape
    try:
        with eagerly(model):
            returned = perturbations.run(model, x, live_norm=True, copies=copies)
    finally:
        tape.rewind()
    return read(returned, copies * tape.batch)


def repeat(
    model: nn.Module, x: Batch, perturbations: Perturbations, read: Read, buffers: Buffers, copies: int = 2
) -> Tensor:
    """The outputs of the fixed function of the search for the batch x, `copies` times in a row."""
    output = read(perturbations.run(model, x, frozen=True, copies=copies), copies * perturbations.tape.batch)
    buffers.restore(thorough=False)
    return output


@dataclass(frozen=True)
class Recorded:
    """The clean pass: the outputs, and the inputs of the chosen layers with a graph between."""

    output: Tensor
    inputs: dict[str, Tensor]
    made_by: CleanPass


def record(
    model: nn.Module, names: Names, x: Batch, settings: SearchSettings, tape: Tape, buffers: Buffers
) -> Recorded:
    """One forward of the batch that fills the tape."""
    random = torch.get_rng_state()
    entering = own_copy(x)
    leaf = entering.requires_grad_() if settings.at_input and isinstance(entering, Tensor) else None
    entering = entering if leaf is None else leaf.clone()  # so that a model may change its input in place
    clean = CleanPass(
        names, tape, entering, settings.chosen, skip_input=settings.skip_input, bounded=settings.bounds is not None
    )
    clean.roles = account(model) if settings.everything else None
    with clean:
        returned = call(model, entering)
    output = settings.read(returned, tape.batch)
    if clean.roles is not None:
        report(model, clean.roles)
    buffers.restore(thorough=False)
    tape.after = RandomState(device_of(model)) if tape.random else None
    if not tape.random and not torch.equal(random, torch.get_rng_state()):
        raise ModelError(
            "the model draws random numbers in a way that cannot be repeated: use torch's own functions for them"
        )
    if not clean.names_called:
        raise ModelError(
            "the model has no affine layer (linear, convolution or product with a parameter): nothing to excite"
        )
    inputs = clean.inputs if leaf is None else {INPUT: leaf, **clean.inputs}
    if not inputs:
        raise ModelError(
            f"none of the chosen layers has an input that can be perturbed; affine layers: {', '.join(clean.names_called)}"
        )
    return Recorded(output, inputs, clean)


def _first_gradients(
    model: nn.Module,
    names: Names,
    x: Batch,
    settings: SearchSettings,
    clean: Recorded,
    buffers: Buffers,
    known_layouts: dict[object, list[Layout | None]],
    direction: Tensor | None,
) -> tuple[Perturbations, dict[str, Tensor], Tensor | None]:
    """The sites, the gradient of v'f with respect to the perturbations at zero, and v (None for scalar outputs)."""
    tape, output, alternations, searches = clean.made_by.tape, clean.output, 0, 1
    if direction is not None:
        direction = direction.to(output.device, wide(output))
    elif output.dim() == 2 and output.shape[1] == 1:
        direction = torch.ones_like(output, dtype=wide(output))
    elif output.dim() == 2:
        direction, alternations, searches = settings.start(output.detach()), settings.alternations, settings.starts
    retain_graph = alternations > 0 or searches > 1
    gradients = gradients_of(along(output, direction).sum(), clean.inputs, retain_graph=retain_graph)
    layouts = find_layouts(model, names, x, clean.made_by, settings.read, known_layouts)
    buffers.restore(thorough=False)
    tape.sites.clear()
    layers = _perturbed_layers(x, settings, clean, gradients, layouts)
    inputs = {name: clean.inputs[name] for name in layers}
    slopes = {
        name: settings.mode.slope(inputs[name].detach(), g) for name in layers if (g := gradients[name]) is not None
    }
    start = Perturbations({}, layers, names, tape, frozenset(clean.made_by.inputs))
    if direction is None or not (alternations or searches > 1):
        return start, slopes, direction

    def slopes_along(v: Tensor, last: bool) -> dict[str, Tensor]:
        gradients = gradients_of(along(output, v).sum(), inputs, retain_graph=not last)
        return {name: settings.mode.slope(inputs[name].detach(), g) for name, g in gradients.items() if g is not None}

    def move(slopes: dict[str, Tensor]) -> Tensor:
        """f(x; d) − f(x) at the best d of the linearised model, the whole radius at once."""
        step = {name: layers[name].step(None, g, settings.norm, 1, tape.batch) for name, g in slopes.items()}
        with torch.no_grad():
            moved = repeat(model, own_copy(x), replace(start, values=step), settings.read, buffers, copies=1)
        return (moved - output.detach()).to(wide(output))

    balls = {name: (layer.layout, layer.radius) for name, layer in layers.items()}
    linearized = Linearized(output.detach(), slopes_along, move, balls, settings.norm)
    v, slopes = find_direction(linearized, direction, slopes, alternations, settings.starts)
    return start, slopes, v


def _perturbed_layers(
    x: Batch,
    settings: SearchSettings,
    clean: Recorded,
    gradients: dict[str, Tensor | None],
    layouts: dict[str, Layout | None],
) -> dict[str, PerturbedInput]:
    """The layers that are perturbed, with the sets that their perturbations lie in."""
    layers = {}
    radii = {name: settings.radius(name) for name in clean.inputs}
    for name, signal in clean.inputs.items():
        number, relative = radii[name]
        layout = layouts[name]
        if gradients[name] is None or layout is None or (not isinstance(number, Tensor) and number == 0):
            continue  # no influence on the output, not perturbed, or a signal that all samples share
        radius = number * settings.size(signal) if relative else number
        bounds = _shaped(settings.bounds, signal, x) if name == INPUT or name in clean.made_by.on_x else None
        if settings.tokens > 1:
            layout = layout.by_token(signal.shape, clean.made_by.tape.batch, settings.tokens, name)
        layers[name] = PerturbedInput(
            layout,
            radius,
            bounds,
            signal.detach() if bounds is not None else None,
            settings.mode,
            allowed=settings.where,
        ).where(clean.made_by.on_x.get(name))
    if not layers:
        raise InputError(
            "nothing would be perturbed: no chosen layer has a radius above 0 and an influence on the output; "
            f"affine layers: {', '.join(clean.made_by.names_called)}"
        )
    return layers


def gradients_of(objective: Tensor, inputs: dict[str, Tensor], retain_graph: bool = False) -> dict[str, Tensor | None]:
    """The gradient with respect to each input, None where it has no influence; `retain_graph` the graph for more of them."""
    if not objective.requires_grad:
        raise ModelError(
            "the model's output has no gradient path to its layers (a detach, no_grad, argmax or rounding?)"
        )
    gradients = torch.autograd.grad(objective, list(inputs.values()), allow_unused=True, retain_graph=retain_graph)
    if all(g is None for g in gradients):
        raise ModelError(
            "no gradient path leads from the chosen layers to the model's output (a detach or no_grad between?)"
        )
    return dict(zip(inputs, gradients))


def find_layouts(
    model: nn.Module, names: Names, x: Batch, clean: CleanPass, read: Read, known: dict[object, list[Layout | None]]
) -> dict[str, Layout | None]:
    """Finds the batch axis of the signal at every site.

    It takes one more forward pass per combination of shapes, or a few more where the samples of the batch are too similar to tell
    them apart.
    """
    tape = clean.tape
    key = (tape.batch, tuple(tape.shapes))
    if key not in known and not tape.shapes:
        known[key] = []  # the input is perturbed, and nothing inside is random
    unknown = key not in known
    # A pass of a sharded model is one of all processes, and their batches may differ in size by one.
    if anyone(unknown, device_of(model)) if is_sharded(model) else unknown:
        registered = frozenset(clean.inputs)
        calibration = PerturbedPass(names, tape, registered, frozen=True, calibrate=True)

        def run(repeated_pass: Pass, copies: int) -> Tensor:
            with torch.no_grad(), repeated_pass:
                returned = call(model, own_copy(x) if copies == 1 else repeated(x, copies, tape.batch))
            repeated_pass.finish()
            return read(returned, copies * tape.batch)

        def any_process(true: bool) -> bool:
            return anyone(true, device_of(model)) if is_sharded(model) else true

        run(calibration, 2)
        tape.layouts, certain = resolve_layouts(run, names, tape, registered, calibration.fitting, any_process)
        if certain:  # otherwise another batch may tell
            known[key] = tape.layouts
    tape.layouts = known.get(key, tape.layouts)
    return {INPUT: Layout(), **{name: tape.layouts[number] for name, number in clean.site_number.items()}}


def along(output: Tensor, direction: Tensor | None) -> Tensor:
    """v'f for each sample, (B,); scalar outputs, (B,), are what they are."""
    return output if direction is None else (output * direction).sum(1)


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
