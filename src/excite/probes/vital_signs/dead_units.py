"""Units whose activation no token of a sample excites, per layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from excite._core.intercept.affine import AffineCall, Names
from excite._core.intercept.together import Together
from excite.errors import ModelError
from excite.probes.base import Every, Probe, Schedule, StepContext, Values
from excite.probes.findings import MAX_NAMED, Finding, MetricSeries, Panel, finite
from excite.probes.layer_inputs import unit_rows
from excite.probes.vital_signs.sample import sample_pass, sample_tokens
from excite.wiring.activations import ActivationCall, Judged, UnitMode

_MAX_DEAD = 0.5  # fraction of dead units above which there is a warning
_NOT_ACTIVATIONS = ("pow", "square", "sqrt", "rsqrt", "reciprocal", "abs")  # of normalizations, and of a GELU by hand


_RESHAPED = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "contiguous")  # numbers stay in order


def _in_order(judged: Judged) -> bool:
    return all(getattr(move.function, "__name__", "") in _RESHAPED for move in judged.moves)


class _Activated(UnitMode):
    """Affine calls whose units reach an activation, with the shape of their input."""

    def __init__(self, names: Names):
        super().__init__(names)
        self.affine: list[tuple[AffineCall, torch.Size, torch.Size]] = []  # with the shapes of input and output
        self.fresh: dict[
            int, Tensor
        ] = {}  # by affine call: where its units are active, if the last activation determines that

    def called(self, call: AffineCall) -> Tensor:
        output = call.run(call.input)
        self.affine.append((call, call.input.shape, output.shape))
        return output

    def activated(self, activation: ActivationCall) -> None:
        self.fresh = {}
        if activation.name not in _NOT_ACTIVATIONS:
            before = [len(judged) for judged in self.judged]
            super().activated(activation)
            self.fresh = {
                number: judged[0].positive
                for number, (count, judged) in enumerate(zip(before, self.judged))
                if not count and judged and not judged[0].before and _in_order(judged[0])
            }

    def active(self, reached: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """(points, units) by layer: where the input of the activation that units reach is positive.

        `reached` has the units of each layer that reach one, None for all; it is filled the first time, which waits for the device.
        """
        result = {}
        for number, (affine, shape, made) in enumerate(self.affine):
            judged = self.judged[number]
            if not judged or any(
                activation.before for activation in judged
            ):  # no activation follows element by element
                continue
            device = judged[0].positive.device
            rows = unit_rows(affine, shape, self.positive(number, lambda: torch.full(made, -1.0, device=device)))  # noqa: B023
            if rows is None:
                continue
            if affine.name not in reached:
                # Elements that reach no activation follow the sign of what is given for them.
                other = unit_rows(affine, shape, self.positive(number, lambda: torch.ones(made, device=device)))  # noqa: B023
                assert other is not None
                units = rows.eq(other).all(0)
                reached[affine.name] = None if bool(units.all()) else units.nonzero().flatten()
            index = reached[affine.name]
            if index is None or len(index):
                result[affine.name] = rows if index is None else rows.index_select(1, index)
        return result


class _Activations:
    """Counts the activations of a pass, and finds the fractions of dead units of the layers whose units enter some of them.

    Args:
        layers: By number of the activation, the layer whose units enter it.
        tokens: (sequences, tokens), 0 for padding.
    """

    def __init__(self, layers: Mapping[int, str], tokens: Tensor | None):
        self.count = 0
        self._layers = layers
        self._together: Together[str, None] = Together(lambda key, active: (dead_fraction(active, tokens),))

    def __call__(self, activation: ActivationCall) -> None:
        layer = self._layers.get(self.count)
        self.count += 1
        if layer is not None:
            self._together.add(layer, activation.positive().flatten(0, -2))

    def finish(self) -> dict[str, Tensor]:
        """The fraction of each layer."""
        return {layer: fraction for layer, (fraction,) in self._together.finish().items()}


class _Plan:
    """Which activation of a pass the units of each layer enter, found by following every layer through one pass."""

    def __init__(self, mode: _Activated):
        self.count = 0
        self.layers: dict[int, str] = {}
        self._mode = mode
        self._entered: dict[
            int, tuple[int, Tensor]
        ] = {}  # by affine call: number of its activation, where it is positive

    def __call__(self, activation: ActivationCall) -> None:
        for number, positive in self._mode.fresh.items():
            self._entered[number] = self.count, positive
        self._mode.fresh = {}
        self.count += 1

    def agrees_with(self, active: Mapping[str, Tensor]) -> bool:
        """Whether the activations alone give what following the layers gave, for all of them. Waits for the device."""
        names = {affine.name: number for number, (affine, _, _) in enumerate(self._mode.affine)}
        for layer, rows in active.items():
            number, positive = self._entered.get(names[layer], (-1, rows[:0]))
            if number < 0 or number in self.layers or positive.dim() < 2:
                return False
            flat = positive.flatten(0, -2)
            if flat.shape != rows.shape or not torch.equal(flat, rows):
                return False
            self.layers[number] = layer
        del self._mode, self._entered
        return True


def dead_fraction(active: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Fraction of units that are active at no point, (...,), of (..., points, units); points that are padding do not count."""
    if tokens is not None and tokens.numel() == active.shape[-2]:
        active = active & (tokens != 0).reshape(-1, 1)
    return (~active.any(-2)).double().mean(-1)


class DeadUnits(Probe):
    """Fraction of units that no token of a sample activates, on two sequences of the example.

    A unit is active where the input of its activation is positive, after the normalization that stands between. Of a ReLU the
    units that are never active receive no gradient from the sample; GELU and SiLU pass a little.

    Records, per layer whose outputs enter an activation:
        ``dead/fraction/LAYER``: units that are active for no token, over all units of the layer.

    Attention and output layers have no activation and no value. The rank of a layer's input is `Rank`'s to measure.

    Args:
        schedule: When to measure. Default: every 50 steps.

    Example:
        >>> from excite.probes import DeadUnits, Every
        >>> probe = DeadUnits(Every(100))
    """

    name = "dead"
    reduction = "mean"
    requires = ("example",)
    panel = Panel(
        "dead",
        "Dead units",
        "The fraction of units of a layer that no token of the sample activates: the input of their activation is never positive.",
        (("fraction", "fraction of dead units"),),
        order=36,
        heatmap=True,
        docs="language-models.md#vital-signs",
    )

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(50) if schedule is None else schedule)
        self._reached: dict[str, Tensor | None] = {}
        self._plan: _Plan | None = None
        self._tried = False

    def attach(self, ctx: StepContext) -> None:
        """Checks that a layer enters an activation."""
        if not self.measure(ctx):
            raise ModelError("no layer enters an activation that can be seen: leave DeadUnits out")

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Values:
        """Measures which units are active on the sample."""
        fractions = self._by_plan(ctx) or self._followed(ctx)
        return {f"fraction/{layer}": fraction for layer, fraction in fractions.items()}

    def _by_plan(self, ctx: StepContext) -> dict[str, Tensor] | None:
        """From the inputs of activations, which takes hardly longer than the pass; None if it runs other ones than before."""
        if self._plan is None:
            return None
        activations = _Activations(self._plan.layers, sample_tokens(ctx))
        sample_pass(ctx, activated=activations)
        fractions = activations.finish()
        if activations.count == self._plan.count and len(fractions) == len(self._plan.layers):
            return fractions
        self._plan = None
        return None

    def _followed(self, ctx: StepContext) -> dict[str, Tensor]:
        """By following the output of every layer to its activation."""
        mode = _Activated(Names(ctx.model))
        plan = _Plan(mode)
        tokens = sample_pass(ctx, mode, activated=plan).tokens
        active = mode.active(self._reached)
        if not self._tried:  # once: it waits for the device
            self._tried = True
            self._plan = plan if active and plan.agrees_with(active) else None
        return {layer: dead_fraction(rows, tokens) for layer, rows in active.items()}

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        last = {layer: finite(series)[1] for layer, series in history.layers("dead/fraction").items()}
        dead = {layer: float(values[-1]) for layer, values in last.items() if len(values) and values[-1] > _MAX_DEAD}
        if not dead:
            return []
        names = sorted(dead, key=lambda layer: -dead[layer])
        listed = ", ".join(f"{dead[layer]:.0%} of {layer}" for layer in names[:MAX_NAMED])
        more = f" and {len(names) - MAX_NAMED} more layers" if len(names) > MAX_NAMED else ""
        return [Finding("warning", f"Units that no token activates: {listed}{more}.",
                        "Lower the learning rate, or use an activation that passes negative inputs.")]  # fmt: skip
