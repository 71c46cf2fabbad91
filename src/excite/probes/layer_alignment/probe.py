"""How close each layer is to rank one, and how well neighbouring layers are aligned: Theorem 2 of Training invariances."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.background import memoize, record_stream
from excite._core.calls import Batch, Pick
from excite._core.checks import check_count, check_model, check_norms, check_weights, model_errors
from excite.errors import InputError
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext
from excite.probes.findings import MAX_NAMED, Finding, MetricSeries, Panel, rise
from excite.probes.layer_alignment.leading import Leading, Search
from excite.probes.layer_alignment.result import Alignments, JunctionAlignment, LayerAlignment
from excite.probes.spectrum import Between
from excite.wiring.junctions import Junction, junctions, parameters_of, plain
from excite.wiring.layers import Layer
from excite.wiring.tracing import Wiring, trace

EXACT = 256


class AlignmentSearch:
    """The matrices of a traced model, and where their searches stand."""

    def __init__(self, wiring: Wiring, exact: int, block: int):
        self.exact, self.block = exact, block
        self.layers = [layer for layer in _by_weight(wiring.layers) if layer.weight_name is not None]
        self.junctions = junctions(wiring)
        layers = {layer.name for layer in self.layers}
        # By junction the key of what makes its channels: a layer, or a matrix of its own. A head has some channels of its layer.
        self._made = {
            junction.name: junction.made_by
            if len(junction.before) == 1 and junction.made_by in layers and plain(junction.before[0])
            else f"{junction.name}/made"
            for junction in self.junctions
        }
        sites = [site for group in wiring.groups for site in group.producers if plain(site)]
        self._out = {site.parameter: site for site in sites}
        self._bases: dict[str, Tensor] = {}
        self._last: Callable[[], object] | None = None

    @property
    def bases(self) -> dict[str, Tensor]:
        """By matrix, where the next search can start. Waits for the last one: which is finished if measurements are some steps apart."""
        if self._last is not None:
            self._last()
        return {key: record_stream(basis) for key, basis in self._bases.items()}

    def go_on(self, bases: Mapping[str, Tensor]) -> None:
        """From those of a checkpoint."""
        self._bases, self._last = dict(bases), None

    def matrices(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weight of every layer as a matrix."""
        return {layer.name: self._matrix(layer, parameters[layer.weight_name or ""]) for layer in self.layers}

    def _matrix(self, layer: Layer, weight: Tensor) -> Tensor:
        """Output channels as rows, whichever axis counts them."""
        site = self._out.get(layer.weight_name or "")
        if site is not None:
            return site.slot.out_rows(weight) if site.side == "out" else site.slot.in_rows(weight)
        return weight.flatten(1) if weight.dim() > 1 else weight[None]

    def begin(
        self, parameters: Mapping[str, Tensor]
    ) -> Callable[[], tuple[dict[str, SpectrumRow], dict[str, Aligned]]]:
        """Starts the measurement: reads the weights, and waits for nothing.

        What it returns gives numbers by layer and by junction. A matrix that is a layer is computed once.
        """
        matrices = self.matrices(parameters)
        layers, made = list(matrices), self._made
        for junction, (name, key) in zip(self.junctions, made.items()):
            if key not in layers:
                matrices[key] = junction.made(parameters)
            matrices[f"{name}/read"] = junction.read(parameters)
        known = self.bases
        bases = [known.get(key) for key in matrices]
        search = Search(list(matrices.values()), bases, exact=self.exact, block=self.block)

        def finish() -> tuple[dict[str, SpectrumRow], dict[str, Aligned]]:
            leading = dict(zip(matrices, search.result()))
            self._bases |= {key: vectors.basis for key, vectors in leading.items() if vectors.basis is not None}
            pairs = [(leading[key].left, leading[f"{name}/read"].left) for name, key in made.items()]
            dots = [(first.double() @ other.double()).abs().clamp(max=1.0) for first, other in pairs]
            rows, values = _fetch(list(leading.values()), dots)
            by_key = dict(zip(leading, rows))
            met = {name: Aligned(value, by_key[key]) for (name, key), value in zip(made.items(), values)}
            return {name: by_key[name] for name in layers}, met

        self._last = memoize(finish)
        return self._last


@dataclass(frozen=True)
class SpectrumRow:
    """A `Leading` in plain numbers."""

    squares: list[float]
    total: float
    fourth: float | None
    residual: float
    small: int
    complete: bool


@dataclass(frozen=True)
class Aligned:
    """|⟨u, v⟩| of a junction, and what makes its channels."""

    value: float
    made: SpectrumRow


def _fetch(leading: Sequence[Leading], dots: Sequence[Tensor]) -> tuple[list[SpectrumRow], list[float]]:
    """All of it in one transfer."""
    fetched = [
        tensors.double().reshape(-1)
        for vectors in leading
        for tensors in (
            vectors.squares,
            vectors.total,
            vectors.residual,
            *([] if vectors.fourth is None else [vectors.fourth]),
        )
    ]
    numbers = iter(torch.cat([*fetched, *(dot.reshape(1) for dot in dots)]).tolist() if fetched else [])
    rows = []
    for vectors in leading:
        squares, total, residual = [next(numbers) for _ in range(len(vectors.squares))], next(numbers), next(numbers)
        fourth = None if vectors.fourth is None else next(numbers)
        rows.append(SpectrumRow(squares, total, fourth, residual, vectors.small, vectors.complete))
    return rows, list(numbers)


@model_errors
def alignment(
    model: nn.Module, example: Batch, *, exact: int = EXACT, iterations: int = 10, output: Pick = None
) -> Alignments:
    """Rank of every layer's weights and alignment of neighbouring layers (Theorem 2 of Training invariances).

    Args:
        model: The model.
        example: A batch as the model takes it, from which its wiring is read.
        exact: Up to this smaller dimension the whole spectrum is computed; beyond, a block Krylov method is used.
        iterations: Rounds of the block Krylov method.
        output: Which part of the model's return value is the output, if it returns several.

    Returns:
        `Alignments`: one `LayerAlignment` per layer and one `JunctionAlignment` per pair of neighbours.

    Raises:
        InputError: If an argument is not what is expected.
        ModelError: If weights are not finite.

    Example:
        >>> result = excite.probes.alignment(model, x)
        >>> round(result["2"].ratio, 6)  # one output: rank one
        1.0
    """
    exact, iterations = check_count(exact, "exact"), check_count(iterations, "iterations")
    check_norms(check_weights(check_model(model)).named_parameters())
    measure = AlignmentSearch(trace(model, example, output=output), exact, 8)
    parameters = parameters_of(model)
    for _ in range(max(1, iterations)):
        done, met = measure.begin(parameters)()
        if not measure.bases:  # all of them are exact
            break
    shapes = {name: matrix.shape for name, matrix in measure.matrices(parameters).items()}
    return Alignments(
        tuple(_layer(name, tuple(shapes[name]), leading) for name, leading in done.items()),
        tuple(_junction(junction, met[junction.name]) for junction in measure.junctions),
    )


def _layer(name: str, shape: tuple[int, ...], leading: SpectrumRow) -> LayerAlignment:
    total, first = leading.total, leading.squares[0]
    ratio = min(1.0, first / total) if total > 0 else 0.0
    second = leading.squares[1] if len(leading.squares) > 1 else 0.0
    participation = None if leading.fourth is None else total**2 / leading.fourth if leading.fourth else 0.0
    return LayerAlignment(
        name,
        (shape[0], shape[1]),
        first**0.5,
        total**0.5,
        ratio,
        1 / ratio if ratio else 0.0,
        participation,
        _effective_rank(leading),
        max(0.0, 2 - 2 * ratio**0.5) ** 0.5,
        1 - second / first if first else 0.0,
        leading.residual,
    )


def _junction(junction: Junction, met: Aligned) -> JunctionAlignment:
    ratio = met.made.squares[0] / met.made.total if met.made.total else 0.0
    return JunctionAlignment(junction.name, junction.law, met.value, ratio)


def _effective_rank(leading: SpectrumRow) -> Between:
    """exp of the entropy of σ²/Σσ².

    What the first k leave is distributed over the others: evenly at most, and at least in pieces as large as the k-th.
    """
    if not leading.total:
        return Between(0.0, 0.0)
    fractions = [square / leading.total for square in leading.squares]
    known = -sum(fraction * math.log(fraction) for fraction in fractions if fraction > 0)
    remainder = max(0.0, 1 - sum(fractions))
    if leading.complete or not remainder:
        return Between(math.exp(known), math.exp(known))
    high = known - remainder * math.log(remainder / max(1, leading.small - len(fractions)))
    low = known - remainder * math.log(max(fractions[-1], 1e-300))
    return Between(math.exp(min(low, high)), math.exp(high))


class Alignment(Probe):
    """How close each layer is to rank one, and how well neighbouring layers are aligned.

    Records, per layer:
        ``alignment/ratio``, ``stable_rank``, ``participation``, ``distance``: see `LayerAlignment`.
        ``alignment/effective_rank``: or ``effective_rank_low`` and ``_high`` where only the first singular values are known.

    Records, per junction a>b (also ``a>b/head0`` and so on for heads of attention):
        ``alignment/aligned``: |⟨u, v⟩| of the leading singular vectors.

    Args:
        schedule: When to measure. Default: every 100 steps.
        exact: Layers whose smaller dimension is above this (256, or 32 on a GPU) are measured by a block Krylov method that starts
            from the vectors of the last measurement or checkpoint.
        block: Number of vectors of that method.
        output: Which part of the model's return value is the output, if it returns several.

    Raises:
        InputError: If there is no example batch.

    Example:
        >>> from excite.probes import Alignment, Every
        >>> watch = excite.watch(model, example=x, probes=[Alignment(Every(100))])
    """

    name = "alignment"
    requires = ("example",)
    panel = Panel(
        "alignment",
        "Alignment",
        "How far neighbouring layers point the same way, and whether the weights still turn. Networks that learn by the same "
        "few directions align and lose rank.",
        (
            ("aligned", "alignment of neighbours (1: the same way)"),
            ("ratio", "fraction of a layer in its first direction"),
            ("stable_rank", "stable rank of the weights"),
            ("distance", "distance to rank one"),
        ),
        order=70,
        docs="alignment.md#rank-and-alignment",
    )
    reduction = "first"  # every process holds the same weights

    def __init__(self, schedule: Schedule | None = None, exact: int | None = None, block: int = 8, output: Pick = None):
        super().__init__(Every(100) if schedule is None else schedule)
        if (exact is not None and exact < 1) or block < 2:
            raise InputError(f"Alignment: expected exact of at least 1 and block of at least 2; got {exact}, {block}")
        self.exact, self.block, self.output = exact, block, output
        self._measure: AlignmentSearch | None = None
        self._stored: dict[str, Tensor] = {}

    def attach(self, ctx: StepContext) -> None:
        """Prepares the measurement; called by `excite.watch`."""
        if ctx.example is None:
            raise InputError("the alignment probe needs an example batch: excite.watch(model, example=x, ...)")
        gpu = any(p.is_cuda for p in ctx.model.parameters())
        exact = self.exact if self.exact is not None else 32 if gpu else EXACT
        self._measure = AlignmentSearch(ctx.wiring(self.output), exact, self.block)
        self._measure.go_on(self._stored)

    def measure(self, ctx: StepContext) -> Measurement:
        """Measures how the leading singular vectors of consecutive layers align."""
        if self._measure is None:
            raise InputError("the alignment probe is not attached: use it through excite.watch")
        parameters = {path: p.detach() for path, p in ctx.parameters.items()}
        # Where watch.step is called under autocast, products of weights would be in half precision.
        device = next(iter(parameters.values())).device.type if parameters else "cpu"
        with torch.no_grad(), torch.autocast(device, enabled=False):
            finish = self._measure.begin(parameters)
            if not any(p.is_cuda for p in parameters.values()):
                return _values(*finish())
        return Deferred(lambda: _values(*finish()))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        bases = self._measure.bases if self._measure is not None else self._stored
        return {"bases": {key: basis.clone() for key, basis in bases.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._stored = dict(state["bases"])
        if self._measure is not None:
            self._measure.go_on(self._stored)

    @classmethod
    def default(cls, output: Pick = None) -> Alignment:
        """Returns the probe as `default_probes` uses it."""
        return cls(Every(50), exact=32, output=output)

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return _turned(history)


def _values(done: Mapping[str, SpectrumRow], met: Mapping[str, Aligned]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, row in done.items():
        layer = _layer(name, (0, 0), row)
        values |= {
            f"ratio/{name}": layer.ratio,
            f"stable_rank/{name}": layer.stable_rank,
            f"distance/{name}": layer.distance,
        }
        if layer.participation is not None:
            values[f"participation/{name}"] = layer.participation
        rank = layer.effective_rank
        ends = {"": rank.low} if row.complete else {"_low": rank.low, "_high": rank.high}
        values |= {f"effective_rank{end}/{name}": value for end, value in ends.items()}
    return values | {f"aligned/{name}": junction.value for name, junction in met.items()}


def _by_weight(layers: tuple[Layer, ...]) -> list[Layer]:
    return list({layer.weight_name: layer for layer in reversed(layers)}.values())[::-1]


def _turned(history: MetricSeries) -> list[Finding]:
    listed = []
    for layer, series in history.layers("alignment/aligned").items():
        up = rise(series)
        if up is not None and up.large and up.now > 0.5:
            listed.append(f"{layer} from {up.before:.2f} to {up.now:.2f}")
    if not listed:
        return []
    more = f", and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return [
        Finding(
            "note",
            f"Neighbouring layers turned towards each other (1 is aligned): {'; '.join(listed[:MAX_NAMED])}{more}.",
        )
    ]
