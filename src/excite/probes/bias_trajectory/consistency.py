"""Assumption 1 of *What training reveals*: do activation patterns and slopes at fixed points still change?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, batch_size, call, pick_output, tensors
from excite._core.checks import check_real, check_tensor, check_values
from excite._core.compatibility import renamed_fields
from excite._core.intercept.affine import AffineCall, Names
from excite._core.layout import Layout, find_layout
from excite.errors import InputError, ModelError
from excite.probes.base import Every, Probe, Schedule, StepContext, Values, counted
from excite.probes.findings import Panel
from excite.wiring.activations import ActivationCall, ActivationMode
from excite.wiring.normalization import Source, as_trained


@renamed_fields(looks="measurements")
@dataclass(frozen=True)
class Consistent:
    """How far activation patterns and slopes stayed the same over several measurements (Assumption 1).

    Attributes:
        gamma: Smallest γ with λ_t(x) ≤ (1 + γ) λ_t'(x) for all points and measurements; infinite if a slope was 0 and then not.
        changed: Fraction of the points whose activation pattern was not the same at all measurements.
        measurements: Number of measurements.

    Example:
        >>> result = excite.probes.consistency(torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.5, 1.0]]))
        >>> result.gamma, result.changed
        (0.5, 0.0)
    """

    gamma: float
    changed: float
    measurements: int

    @property
    def holds(self) -> bool:
        """Whether no pattern changed. Between measurements it may have."""
        return self.changed == 0


def consistency(patterns: Tensor, slopes: Tensor) -> Consistent:
    """Judges Assumption 1 from activation patterns and slopes at fixed points.

    Args:
        patterns: One pattern, or a hash of it, for each measurement and point: (measurements, N, ...).
        slopes: One slope for each: (measurements, N).

    Returns:
        A `Consistent`.

    Raises:
        InputError: If the shapes do not fit.

    Example:
        >>> from excite.probes import consistency
        >>> result = consistency(torch.tensor([[1, 2], [1, 3]]), torch.ones(2, 2))
        >>> result.changed, result.gamma
        (0.5, 0.0)
    """
    check_tensor(patterns, "patterns", floating=False)
    check_values([check_tensor(slopes, "slopes")], "slopes")
    if slopes.dim() != 2 or patterns.shape[:2] != slopes.shape or not slopes.numel():
        raise InputError(
            f"expected patterns (measurements, N, ...) and slopes (measurements, N); got {tuple(patterns.shape)} and {tuple(slopes.shape)}"
        )
    same = (patterns == patterns[:1]).reshape(*slopes.shape, -1).all(2).all(0)
    largest, smallest = slopes.amax(0), slopes.amin(0)
    ratio = torch.where(largest > 0, largest / smallest, 1.0)
    return Consistent(float(ratio.max()) - 1, float((~same).double().mean()), len(slopes))


class _Pieces(ActivationMode):
    """For every kink of every activation of a pass, which elements of its input are above it; with `keep_inputs` the input."""

    def __init__(self, names: Names, keep_inputs: bool = False):
        super().__init__(names)
        self.keep_inputs = keep_inputs
        self.signals: list[Tensor] = []
        self._smooth: list[int] = []  # those of smooth activations since the last affine call

    def visit(self, call: AffineCall) -> Tensor:
        self._smooth.clear()
        return call.run(call.input)

    def activated(self, activation: ActivationCall) -> None:
        for kink in activation.kinks:
            if activation.smooth:
                self._smooth.append(len(self.signals))
            input = activation.input.detach()
            self.signals.append(input.clone() if self.keep_inputs else input > kink)

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.__name__.startswith("rnn_relu"):
            raise ModelError(
                f"{function.__name__} holds its activations inside one kernel: their patterns cannot be followed"
            )
        return super().opaque(function, args, kwargs)

    def hidden(self) -> list[Tensor]:
        """All but those of a smooth function after the last affine call: the paper's sigmoid at the output is no pattern."""
        return [signal for i, signal in enumerate(self.signals) if i not in self._smooth]


def patterns_and_slopes(model: nn.Module, x: Tensor, output: Pick = None) -> tuple[Tensor, Tensor]:
    """Which hidden units are active (N, units), and ‖∇f‖₂ (N,), of the function that training changes; see `Consistency`."""
    return _patterns_and_slopes(model, x, output, None)[:2]


Layouts = list[Layout | None]


def _patterns_and_slopes(
    model: nn.Module, x: Tensor, output: Pick, layouts: Layouts | None
) -> tuple[Tensor, Tensor, Layouts, dict[str, Source]]:
    size = batch_size(x)
    with torch.enable_grad(), as_trained(model, x) as statistics:
        leaf = x.detach().clone().requires_grad_()
        with _Pieces(Names(model)) as pieces:
            f = check_real(pick_output(call(model, leaf.clone()), output))
        if f.numel() != len(x):
            raise ModelError(f"expected a model with one output; got outputs of shape {tuple(f.shape)}")
        if not f.requires_grad:
            raise ModelError(
                "the output does not depend on the inputs by a differentiable path: return it without detach()"
            )
        (gradient,) = torch.autograd.grad(f.sum(), leaf, materialize_grads=True)
        result = pieces.hidden()
        if layouts is None or len(layouts) != len(result):
            layouts = _layouts(model, x)
    if len(layouts) != len(result):
        raise ModelError("the model calls other activations for other batches: patterns cannot be followed")
    each = [layout.by_sample(signal, size) for signal, layout in zip(result, layouts) if layout is not None]
    signs = torch.cat(each, 1) if each else torch.zeros(size, 0, dtype=torch.bool, device=x.device)
    return signs, torch.linalg.vector_norm(gradient.flatten(1), dim=1), layouts, dict(statistics.sources)


def _layouts(model: nn.Module, x: Tensor) -> Layouts:
    """Where the samples lie in the input of every activation; None where it does not depend on them."""
    few = x.detach()[:8]
    result = []
    for batch in (few, torch.cat([few, few])):
        with _Pieces(Names(model), keep_inputs=True) as pieces, torch.no_grad():
            call(model, batch.clone())
        result.append(pieces.hidden())
    if len(result[0]) != len(result[1]):
        raise ModelError("the model calls other activations for other batches: patterns cannot be followed")
    return [find_layout(single, two, len(few), f"activation {i + 1}") for i, (single, two) in enumerate(zip(*result))]


class Consistency(Probe):
    """Changes of activation patterns and slopes on the example, between this measurement and the last (Assumption 1).

    The pattern is s_t of the paper: where the inputs of the activations are positive, after any normalization or residual sum
    before them. For activations with several kinks it is the piece on which each input lies, for smooth ones in hidden layers
    the sign of the input. Which element a max-pooling selects is not part of the pattern; it shows in gamma. Normalizations use
    the statistics of the example as constants, unless they are frozen. `since(step)` judges all measurements from a step on.

    Records:
        ``consistency/points``: fraction of points whose activation pattern changed.
        ``consistency/units``: fraction of units that switched.
        ``consistency/gamma``: largest factor between the two slopes at a point, minus 1.
        ``consistency/statistics/...``: as for `Rank`.

    Args:
        schedule: When to measure. Default: every 100 steps.
        output: Which part of the model's return value is the output, if it returns several.

    Example:
        >>> from excite.probes import Consistency, Every
        >>> probe = Consistency(Every(1))
        >>> with excite.watch(model, example=x, probes=[probe]) as watch:
        ...     watch.step()
        >>> probe.since(0).changed
        0.0
    """

    name = "consistency"
    requires = ("example",)
    panel = Panel(
        "consistency",
        "Activation patterns",
        "Whether activation patterns and slopes at the points of the example still change between two measurements. Where they "
        "do not, the network is linear in a neighbourhood of the training path.",
        (
            ("points", "fraction of points whose pattern changed"),
            ("units", "fraction of units that switched"),
            ("gamma", "γ: largest change of a slope"),
        ),
        order=90,
        hidden=("statistics",),
        docs="trajectory.md",
    )
    reduction = "max"

    def __init__(self, schedule: Schedule | None = None, *, output: Pick = None):
        super().__init__(Every(100) if schedule is None else schedule)
        self.output = output
        self._last: Tensor | None = None
        self._layouts: Layouts | None = None
        self._measurements: list[tuple[int, Tensor, Tensor]] = []  # step, hashes of the patterns, slopes

    def measure(self, ctx: StepContext) -> Values:
        """Records the activation pattern and slope at every example."""
        if (
            ctx.example is None
            or not isinstance(ctx.example, Tensor)
            or not tensors(ctx.example)[0].is_floating_point()
        ):
            raise InputError(
                "the consistency probe needs an example batch, one tensor: excite.watch(model, example=x, ...)"
            )
        signs, slopes, self._layouts, statistics = _patterns_and_slopes(
            ctx.model, ctx.example, self.output, self._layouts
        )
        signs, slopes = signs.cpu(), slopes.cpu()
        before, self._last = self._last, signs
        generator = torch.Generator().manual_seed(0)
        keys = torch.randint(-(2**62), 2**62, (signs.shape[1],), generator=generator)
        self._measurements.append((ctx.step, torch.where(signs, keys, 0).sum(1), slopes))
        if before is None or len(self._measurements) < 2:
            return {}
        if signs.shape != before.shape:
            raise ModelError("the model calls other activations than before: patterns cannot be compared")
        ends = torch.stack([self._measurements[-2][2], slopes])
        ratio = torch.where(ends.amax(0) > 0, ends.amax(0) / ends.amin(0), 1.0)
        return {
            "points": (signs != before).any(1).double().mean(),
            "units": (signs != before).double().mean() if signs.shape[1] else 0.0,
            "gamma": ratio.max() - 1,
            **counted(statistics),
        }

    def since(self, step: int = 0) -> Consistent:
        """Result over the measurements from a step on.

        Args:
            step: First step to take into account.

        Returns:
            How consistent activation patterns and slopes were over these measurements.

        Raises:
            InputError: If nothing was measured at or after the step.
        """
        retained = [(hashes, slopes) for at, hashes, slopes in self._measurements if at >= step]
        if not retained:
            raise InputError(
                f"no measurement at or after step {step}: the last one was at {self._measurements[-1][0] if self._measurements else None}"
            )
        hashes, slopes = (torch.stack(column) for column in zip(*retained))
        return consistency(hashes, slopes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        if not self._measurements:
            return {}
        steps, hashes, slopes = zip(*self._measurements)
        return {"steps": list(steps), "hashes": torch.stack(hashes), "slopes": torch.stack(slopes), "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._measurements = list(zip(state["steps"], state["hashes"], state["slopes"])) if state else []
        self._last = state.get("last")
