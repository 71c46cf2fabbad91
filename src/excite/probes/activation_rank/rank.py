"""How many directions the input of a layer uses, while a network trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from excite._core.calls import Pick, batch_size
from excite._core.checks import check_count, check_flag, check_tensor, check_values, shown
from excite._core.compatibility import renamed_keywords
from excite._core.warn import warn_user
from excite._core.wrappers import is_sharded
from excite.errors import ExciteError, InputError
from excite.probes.activation_rank.covariance import Covariances
from excite.probes.activation_rank.samples import Live, Rows
from excite.probes.activation_rank.smallest import default_tolerance
from excite.probes.activation_rank.units import UnitSums, live_rows
from excite.probes.base import (
    Deferred,
    Every,
    LayerSignal,
    Measurement,
    Probe,
    Reduction,
    Schedule,
    StepContext,
    counted,
)
from excite.probes.findings import (
    ANSWERS,
    MAX_NAMED,
    Change,
    Finding,
    MetricSeries,
    Panel,
    Series,
    answered_rank,
    fall,
    finite,
    number,
    rise,
    since,
    since_step,
)
from excite.probes.layer_inputs import LayerInputs, layer_inputs
from excite.probes.vital_signs.blocks import has_attention
from excite.probes.vital_signs.sample import logits_of
from excite.wiring.normalization import Source, as_trained

_MAX_TRACKED = 64  # units of one layer, over a whole training


def effective_rank(rows: Tensor) -> float:
    """Effective rank of a set of vectors (Roy and Vetterli): exp(−Σ pᵢ log pᵢ) with pᵢ = λᵢ/Σλ, λ the eigenvalues of their covariance.

    Args:
        rows: Vectors (N, D).

    Returns:
        A number between 1 (all variance in one direction) and min(N − 1, D) (equal variance in all); 0 if all rows are equal.

    Raises:
        InputError: If `rows` is empty or not finite.

    Example:
        >>> import torch
        >>> from excite.probes import effective_rank
        >>> round(effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 6)
        2.0
    """
    check_values([check_tensor(rows, "rows (N, D)", 2)], "rows")
    if not rows.numel():
        raise InputError(f"expected at least one row and one column; got {shown(rows)}")
    return float(Covariances([rows]).spectra()[0].effective_rank)


class Rank(Probe):
    """Rank of the input of each affine layer on the example, from the eigenvalues λ of its covariance.

    A row is the input of a linear layer or a patch of the input of a convolution; channels of a grouped convolution count
    together. The example passes through the network as in training, without its noise: no dropout, and normalizations use the
    statistics of the example. `excite.probes.richness` measures all of the data instead.

    Records:
        ``rank/effective/LAYER``: exp of the entropy of λ/Σλ.
        ``rank/share/LAYER``: the same over the width of the layer.
        ``rank/participation/LAYER``: (Σλ)²/Σλ².
        ``rank/numerical/LAYER``: number of λ that are not zero up to rounding.
        ``rank/smallest/LAYER``: the smallest λ over the largest.
        ``rank/statistics/example``: number of normalizations that used the statistics of the example.
        ``rank/statistics/running``: number that used running statistics because they are in evaluation mode.
        ``rank/statistics/few``: number that used running statistics because the example has one value per channel.
        ``rank/answers``: number of classes of a model with attention that returns one row of logits per sequence, not per
        token (2 for one logit): towards as many directions its layers may collapse without harm.
        ``rank/deficient/LAYER``: with `units=True`, fraction of the layer's units that the example does not excite (`Units`).
        ``rank/unit/LAYER/K``: with `units=True`, 1 at the step at which unit K stopped being excited and 0 at the step at
        which it was excited again; no more than 64 units per layer, and no value for units that do not change.

    Args:
        schedule: When to measure. Default: every 50 steps.
        max_rows: Largest number of rows per layer.
        units: Also judge every unit. This solves one eigenvalue problem per unit, which costs far more than the rest: use a
            schedule of its own.

    Raises:
        InputError: If an argument is not what is expected.

    Example:
        >>> from excite.probes import Every, Rank
        >>> watch = excite.watch(model, example=x, probes=[Rank(Every(100))])
    """

    name = "rank"
    requires = ("example",)
    panel = Panel(
        "ranks",
        "How many directions each layer's input uses",
        "Effective rank of the input of each affine layer (patches, for convolutions), over the layer's input width. Where it "
        "falls, the layer sees fewer directions, and its weights along the others are not excited: nothing in training bounds "
        "them. Measured on the example as in training, without dropout: batch normalization uses the statistics of the "
        "example, unless it is frozen.",
        (
            ("share", "effective rank / width"),
            ("effective", "effective rank"),
            ("participation", "participation ratio"),
            ("numerical", "numerical rank"),
            ("smallest", "smallest eigenvalue / largest"),
            ("deficient", "fraction of units not excited"),
        ),
        order=50,
        heatmap=True,
        hidden=("unit", "statistics", "answers"),
        docs="richness.md#quantities-of-a-layer",
    )
    reduction = "mean"
    reductions: ClassVar[Mapping[str, Reduction]] = {"unit": "first"}

    @renamed_keywords(most_rows="max_rows")
    def __init__(self, schedule: Schedule | None = None, max_rows: int = 1024, units: bool = False):
        super().__init__(Every(50) if schedule is None else schedule)
        max_rows, units = check_count(max_rows, "Rank: max_rows"), check_flag(units, "Rank: units")
        self.max_rows, self.units = max_rows, units
        self._deficient: dict[str, list[int]] = {}  # by layer, when it was measured last
        self._named: dict[str, list[int]] = {}
        self._warned = False
        self._attends: bool | None = None  # whether the model has attention, once it was measured

    def measure(self, ctx: StepContext) -> Measurement:
        """Measures ranks and excited units of the inputs of every layer."""
        signals = [signal for signal in ctx.signals if signal.input.is_floating_point()]
        statistics = ctx.statistics
        self._warn(statistics)
        known = counted(statistics) | self._answers(ctx)
        inputs = [self._inputs(signal) for signal in signals]
        covariances = Covariances([layer_rows.rows for layer_rows in inputs])
        layers = [signal.layer for signal in signals]
        if covariances.apart and not self.units:
            return Deferred(lambda: _values(layers, covariances) | known)
        values = _values(layers, covariances) | known
        if not self.units:
            return values
        counts = self._counted(ctx)
        for layer, signal, input_ in zip(layers, signals, inputs):
            if input_.active is not None:
                live = counts(signal.call, signal.input.shape, input_)
                if live is not None and len(live) > len(input_.rows):  # thinned out like the rows
                    live = live[:: math.ceil(len(live) / self.max_rows)]
                bad = _deficient(input_, live)
                values[f"deficient/{layer}"] = len(bad) / input_.active.shape[1]
                values |= {f"unit/{layer}/{unit}": value for unit, value in self._changed(layer, bad)}
        return values

    def _answers(self, ctx: StepContext) -> dict[str, float]:
        """The number of classes of a model of sequences that returns one row of logits for each."""
        if self._attends is None:
            self._attends = has_attention(ctx.model)
        if ctx.example is None or not self._attends:
            return {}
        try:
            logits = logits_of(ctx.output)
        except ExciteError:
            return {}
        per_sequence = logits.dim() == 2 and len(logits) == batch_size(ctx.example)
        return {"answers": float(logits.shape[1])} if per_sequence else {}

    def _counted(self, ctx: StepContext) -> Rows:
        """Which rows count in Theorem 1: those of points at which the output is not zero."""
        if is_sharded(ctx.model):  # a pass is one of all processes, and not all may need one
            return lambda call, shape, inputs: None
        with torch.no_grad(), as_trained(ctx.model, ctx.example):  # type: ignore[arg-type]
            return Live(ctx.model).of(ctx.example, ctx.output)  # type: ignore[arg-type]

    def _warn(self, statistics: Mapping[str, Source]) -> None:
        few = [path for path, source in statistics.items() if source == "few"]
        if few and not self._warned:
            self._warned = True
            warn_user(
                f"{few[0]} gets one value per channel from the example, so its running statistics are used, which early in "
                "training are those of an untrained network: give excite.watch an example of two samples or more"
            )

    def _changed(self, layer: str, bad: list[int]) -> list[tuple[int, float]]:
        """(unit, 1 if it is excited no longer, 0 if it is again) for those that changed since the last measurement."""
        before, named = set(self._deficient.get(layer, bad)), self._named.setdefault(layer, [])
        self._deficient[layer] = bad
        changed = [(unit, 1.0) for unit in bad if unit not in before] + [(unit, 0.0) for unit in before - set(bad)]
        for unit, _ in changed:
            if unit not in named and len(named) < _MAX_TRACKED:
                named.append(unit)
        return [(unit, value) for unit, value in changed if unit in named]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {"deficient": dict(self._deficient), "named": dict(self._named)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._deficient, self._named = dict(state.get("deficient", {})), dict(state.get("named", {}))

    def _inputs(self, signal: LayerSignal) -> LayerInputs:
        """Linear layers are thinned out evenly, convolutions by patches."""
        items = signal.input.shape[0]
        with torch.no_grad():
            positive = signal.positive if self.units else None
            layer = layer_inputs(signal.call, signal.input, positive, max(1, self.max_rows // max(1, items)))
        step = max(1, math.ceil(len(layer.rows) / self.max_rows))
        active = None if layer.active is None else layer.active[::step]
        return LayerInputs(
            layer.rows[::step], layer.total, layer.sample_index[::step], layer.items, active, layer.groups
        )

    @classmethod
    def default(cls, output: Pick = None) -> Rank:
        """Returns the probe as `default_probes` uses it."""
        return cls(Every(50), max_rows=128)

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return [*_ranks(history), *_units(history), *_statistics(history)]


def _values(layers: Sequence[str], covariances: Covariances) -> dict[str, float]:
    values: dict[str, float] = {}
    for layer, spectrum in zip(layers, covariances.spectra()):
        rank = float(spectrum.effective_rank)
        result = {
            "effective": rank,
            "share": rank / spectrum.width,
            "participation": float(spectrum.participation_ratio),
            "numerical": float(spectrum.rank),
            "smallest": float(spectrum.smallest) / float(spectrum.largest) if spectrum.total else 0.0,
        }
        values |= {f"{quantity}/{layer}": value for quantity, value in result.items()}
    return values


def _deficient(inputs: LayerInputs, live: Tensor | None) -> list[int]:
    """The units that these rows do not excite."""
    rows, active = live_rows(inputs, live)
    inputs = replace(inputs, rows=rows, active=active)
    count = inputs.active.shape[1]  # type: ignore[union-attr]
    width = inputs.rows.shape[1] // inputs.groups
    points = inputs.active.sum(0).tolist()  # type: ignore[union-attr]
    bad = []
    for unit in range(count):  # one matrix at a time
        if points[unit] < width:  # so few points cannot use all directions
            bad.append(unit)
            continue
        unit_sums = UnitSums(range(unit, unit + 1), count, inputs.rows.shape[1], inputs.groups, inputs.rows.device)
        unit_sums.add(inputs)
        (verdict,) = unit_sums.decide(default_tolerance(unit_sums.width, inputs.rows.dtype), accuracy=1.0)
        if not verdict.excited:
            bad.append(unit)
    return bad


_EXCITE = "Lower the learning rate or the weight decay, or excite these layers."
_STATISTICS_TEXTS = {
    "example": "with those of the example, as in training",
    "running": "with running statistics, because they are in evaluation mode",
    "few": "with running statistics, because the example has one value per channel: those of an untrained network at first",
}


def _series(history: MetricSeries, key: str) -> dict[str, Series]:
    """By layer, without step 0 where normalizations used running statistics: those of an untrained network are arbitrary."""
    running = any(len(history[f"rank/statistics/{source}"][0]) for source in ("running", "few"))
    return {layer: since_step(series, 1) if running else series for layer, series in history.layers(key).items()}


def _fallen(history: MetricSeries) -> list[tuple[str, Change]]:
    """Layers whose effective rank fell, the worst first."""
    falls = {layer: fall(series) for layer, series in _series(history, "rank/effective").items()}
    result = [(k, d) for k, d in falls.items() if d is not None and d.large and d.before - d.now >= 1]
    return sorted(result, key=lambda item: -item[1].fraction)


def _ranks(history: MetricSeries) -> list[Finding]:
    fractions, directions_lost, fallen = history.layers("rank/share"), _units_lost(history), _fallen(history)
    names = {layer for layer, _ in fallen}
    risen: list[tuple[str, Change]] = []
    for layer, series in _series(history, "rank/effective").items():
        up = rise(series) if layer not in names else None
        if up is not None and up.large and up.now - up.before >= 1:
            risen.append((layer, up))
    needed = answered_rank(history)
    if fallen and needed is not None and all(down.now >= needed for _, down in fallen):
        result = [_answered(fallen, history)]
    else:
        result = [_collapse(fallen, fractions, directions_lost)] if fallen else []
    if risen:
        listed = "; ".join(
            f"{layer} from {number(up.before)} to {number(up.now)} {since(up)}" for layer, up in risen[:MAX_NAMED]
        )
        tail = f", and {len(risen) - MAX_NAMED} more" if len(risen) > MAX_NAMED else ""
        result.append(Finding("good", f"Layers gained rank, they see more directions of their input: {listed}{tail}."))
    return result


def _answered(fallen: Sequence[tuple[str, Change]], history: MetricSeries) -> Finding:
    """A network that has learned which of m classes a sequence belongs to needs m − 1 directions."""
    classes, lowest = int(finite(history[ANSWERS])[1][-1]), min(down.now for _, down in fallen)
    layers = f"The inputs of {len(fallen)} layers" if len(fallen) > 1 else f"The input of layer {fallen[0][0]}"
    text = (
        f"{layers} lost rank while the loss fell, down to {number(lowest)}: {classes} classes need {classes - 1} "
        f"direction{'s' if classes > 2 else ''}. The network has collapsed to its answers; weights along other directions are no longer excited."
    )
    return Finding("note", text)


def _collapse(
    fallen: Sequence[tuple[str, Change]], fractions: Mapping[str, Series], directions_lost: Mapping[str, str]
) -> Finding:
    """One sentence for all layers that lost rank."""
    if len(fallen) > 1:
        listed = "; ".join(
            f"{layer} from {number(down.before)} to {number(down.now)} {since(down)}"
            for layer, down in fallen[:MAX_NAMED]
        )
        tail = f", and {len(fallen) - MAX_NAMED} more" if len(fallen) > MAX_NAMED else ""
        text = (
            f"The inputs of {len(fallen)} layers lost rank: {listed}{tail}; weights along the lost directions are no longer "
            "excited."
        )
        return Finding("warning", text, _EXCITE)
    layer, down = fallen[0]
    text = f"Layer {layer}'s input activations fell from rank {number(down.before)} to {number(down.now)} {since(down)}"
    fraction = (
        float(finite(fractions[layer])[1][-1]) if layer in fractions and len(finite(fractions[layer])[1]) else 0.0
    )
    consequence = (
        f"it now sees about {number(down.now)} of {down.now / fraction:.0f} directions"
        if fraction > 0
        else "it sees few directions"
    )
    tail = (
        f"; {directions_lost[layer]}."
        if layer in directions_lost
        else ", and its weights along the others are no longer excited."
    )
    return Finding("warning", f"{text}: {consequence}{tail}", _EXCITE)


def _units_lost(history: MetricSeries) -> dict[str, str]:
    """By layer "units 3, 17 and 40 are no longer excited".

    `rank/unit/LAYER/UNIT` is 1 from the step at which a unit stopped being excited, 0 from the step at which it was again.
    """
    named: dict[str, list[int]] = {}
    for name, series in history.layers("rank/unit").items():
        layer, _, unit = name.rpartition("/")
        values = finite(series)[1]
        if layer and unit.isdecimal() and len(values) and values[-1] > 0.5:
            named.setdefault(layer, []).append(int(unit))
    return {
        layer: f"{_units_listed(sorted(units))} {'is' if len(units) == 1 else 'are'} no longer excited"
        for layer, units in named.items()
    }


def _units(history: MetricSeries) -> list[Finding]:
    """Layers whose rank fell say so themselves; `rank/deficient/LAYER` is the fraction of all units."""
    result = []
    fallen = _fallen(history)
    directions_lost, named_layers = _units_lost(history), {layer for layer, _ in fallen} if len(fallen) == 1 else set()
    for layer, text in directions_lost.items():
        if layer not in named_layers:
            result.append(Finding("warning", f"In layer {layer}, {text} by the example.", _EXCITE))
    for layer, series in _series(history, "rank/deficient").items():
        up = rise(series)
        if up is not None and layer not in directions_lost and up.clear and up.now - up.before >= 0.05:
            text = f"In layer {layer}, {up.now:.0%} of the units are not excited by the example, {up.before:.0%} at best before"
            result.append(
                Finding(
                    "warning",
                    f"{text} ({since(up)}): nothing in training bounds their weights along some directions.",
                    _EXCITE,
                )
            )
    return result


def _statistics(history: MetricSeries) -> list[Finding]:
    """Which statistics normalizations used when layers were measured: `rank/statistics/SOURCE` counts them."""
    series = {source: layer for source, layer in history.layers("rank/statistics").items() if len(layer[0])}
    if not series:
        return []
    last = max(int(steps[-1]) for steps, _ in series.values())
    counts = {source: int(values[-1]) for source, (steps, values) in series.items() if steps[-1] == last}
    listed = "; ".join(f"{counts[source]} {text}" for source, text in _STATISTICS_TEXTS.items() if source in counts)
    text = f"Statistics of the normalizations when layers were measured: {listed}."
    changed = len(counts) < len(series) or any(len(set(values)) > 1 for _, values in series.values())
    if changed:
        text += " It was not the same at all steps: ranks before and after such a change do not compare."
    return [Finding("warning" if changed or "few" in counts else "note", text)]


def _units_listed(units: Sequence[int]) -> str:
    if len(units) == 1:
        return f"unit {units[0]}"
    if len(units) <= 5:
        return f"units {', '.join(map(str, units[:-1]))} and {units[-1]}"
    return f"units {', '.join(map(str, units[:4]))} and {len(units) - 4} more"
