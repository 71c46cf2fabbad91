"""How rich the activations of every layer are, and which units they excite: of a model on data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.checks import (
    check_count,
    check_model,
    check_number,
    check_seed,
    check_weights,
    is_flag,
    model_errors,
    shown,
)
from excite._core.intercept.affine import AffineCall
from excite.errors import InputError
from excite.probes.activation_rank.moments import EXACT, SKETCH, Moments
from excite.probes.activation_rank.result import LayerRichness, Richness, Sampling
from excite.probes.activation_rank.smallest import Smallest, default_tolerance
from excite.probes.activation_rank.units import UnitFactors, Units, UnitSums, collected
from excite.probes.inspect import Batches, Inputs, Visit, inspect_layers
from excite.probes.layer_inputs import LayerInputs, Patches


@model_errors
def richness(
    model: nn.Module, data: Any, *, units: bool | Sequence[str] = False, patches: Patches = 4, exact: int = EXACT,
    sketch: int = SKETCH, tolerance: float | None = None, accuracy: float = 1e-4, batch: int = 250, memory: int =
    128, inputs: Inputs | None = None, seed: int = 0,
) -> Richness:  # fmt: skip
    """Spectrum, rank and smallest eigenvalues of the input of every affine layer, and which of its units are excited.

    The model runs in evaluation mode, batch by batch, and is left unchanged; no activations are stored. Normalizations use their
    running statistics: this is about the model as it would be deployed. For every layer the covariance (a mean over rows) is
    summed in float64; a row is the input of a linear layer or a patch of the input of a convolution.

    Args:
        model: The model.
        data: Inputs (N, ...) as a tensor (or tuple or dict of them), or a loader; see `Batches` for what it may yield.
        units: Also judge every unit of every layer, or of the named layers. The data is read once more for every `memory` MB of
            matrices (one per unit, width² · 8 bytes), so a loader has to be repeatable.
        patches: Number of patches of each image, chosen by `seed`; None takes all, "whole" the images as one vector each.
        exact: Up to this width matrices are stored exactly; beyond, a sketch of `sketch` rows with its error bound.
        sketch: Rows of the sketch.
        tolerance: Eigenvalues up to tolerance · largest count as zero. Default: `smallest.default_tolerance`.
        accuracy: Accuracy of the units' smallest eigenvalues, over their largest; at least a tenth of the value in any case.
        batch: Number of points per forward pass if `data` is not a loader.
        memory: Memory for the matrices of units, in MB.
        inputs: Function from what the loader yields to the input of the model.
        seed: Seed of the choice of patches.

    Returns:
        A `Richness` with one `LayerRichness` per affine layer.

    Raises:
        InputError: If the data is empty or not finite, or an argument is not what is expected.
        ModelError: If the model has no affine layer.

    Example:
        >>> result = excite.probes.richness(model, x)
        >>> float(result["0"].covariance.rank)  # of the 4 inputs
        4.0
    """
    _check(model, patches, exact=exact, sketch=sketch, memory=memory)
    _check_tolerance(tolerance)
    accuracy, seed = check_number(accuracy, "accuracy", 0, above=True), check_seed(seed)
    if not is_flag(units) and not isinstance(units, list | tuple):
        raise InputError(f"units: expected True, False or a list of layer names; got {shown(units)}")
    batches = Batches(data, batch, inputs)
    layers: dict[str, _LayerMoments] = {}
    notes: dict[str, str] = {}
    visit = _add_to(layers, exact, sketch)
    inspect_layers(model, batches, visit, patches=patches, seed=seed, active=bool(units), notes=notes)
    results = {name: layer.result(tolerance) for name, layer in layers.items()}
    if units:
        if batches.single_pass:
            raise InputError("units need several passes over the data: give a tensor or a loader, not an iterator")
        chosen = _chosen(units, layers, exact, results)
        for name, result in judge(model, batches, chosen, patches, seed, tolerance, accuracy, memory).items():
            results[name] = replace(results[name], units=result, units_note=notes.get(name, ""))
    return Richness(tuple(results.values()))


@dataclass
class _LayerMoments:
    """Sums over one layer."""

    name: str
    kind: str
    moments: Moments
    rows: int = 0
    total: int = 0
    units: int | None = None
    groups: int = 1
    dtype: torch.dtype = torch.float64

    def add(self, inputs: LayerInputs) -> None:
        try:
            self.moments.add(inputs.rows)
        except InputError as error:
            raise InputError(f"layer {self.name!r}: {error}") from error
        self.rows, self.total = self.rows + len(inputs.rows), self.total + inputs.total
        self.units = None if inputs.active is None else inputs.active.shape[1]
        self.groups, self.dtype = inputs.groups, inputs.rows.dtype

    def result(self, tolerance: float | None) -> LayerRichness:
        try:
            covariance, second = self.moments.covariance(tolerance), self.moments.second(tolerance)
        except InputError as error:
            raise InputError(f"layer {self.name!r}: {error}") from error
        sampling = None
        if self.rows < self.total:
            sampling = Sampling(self.rows, self.total, self.moments.sampling_error(self.total))
        return LayerRichness(self.name, self.kind, self.rows, covariance, second, self.moments.exact, sampling)


def _add_to(layers: dict[str, _LayerMoments], exact: int, sketch: int) -> Visit:
    """A visitor that adds the inputs of every affine call to the moments of its layer."""

    def visit(name: str, call: AffineCall, inputs: LayerInputs, live: Tensor | None) -> None:
        if name not in layers:
            layers[name] = _LayerMoments(
                name, call.kind, Moments(inputs.rows.shape[1], exact, sketch, inputs.rows.device)
            )
        layers[name].add(inputs)

    return visit


def judge(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[_LayerMoments],
    patches: Patches,
    seed: int,
    tolerance: float | None,
    accuracy: float,
    memory: int,
) -> dict[str, Units]:
    """The units of `layers`, in as many passes over the data as the memory (in MB) requires."""
    result: dict[str, dict[int, tuple[Smallest, int]]] = {layer.name: {} for layer in layers}
    by_name = {layer.name: layer for layer in layers}
    limits = {
        layer.name: default_tolerance(layer.moments.width // layer.groups, layer.dtype)
        if tolerance is None
        else tolerance
        for layer in layers
    }
    for jobs in _passes(layers, memory * 10**6):
        sums = {
            name: UnitSums(job, layer.units or 0, layer.moments.width, layer.groups, layer.moments.device)
            for name, job in jobs.items()
            for layer in (by_name[name],)
        }
        _through(model, batches, sums, patches, seed)
        doubtful: dict[str, UnitFactors] = {}
        for name in list(sums):
            layer_sums = sums.pop(name)  # so that its memory is free for the next pass
            verdicts = layer_sums.decide(limits[name], accuracy)
            result[name].update({k: (v, int(n)) for k, v, n in zip(layer_sums.units, verdicts, layer_sums.points)})
            unsure = [k for k, v in zip(layer_sums.units, verdicts) if not v.sure]
            if unsure:
                layer = by_name[name]
                doubtful[name] = UnitFactors(unsure, layer.units or 0, layer.moments.width, layer.groups)
        del layer_sums
        if doubtful:
            _through(model, batches, doubtful, patches, seed)
            for name, factors in doubtful.items():
                for k in factors.units:
                    result[name][k] = (factors.decide(k, limits[name]), result[name][k][1])
    return {
        name: collected(
            [units[k] for k in sorted(units)], by_name[name].moments.width // by_name[name].groups, limits[name]
        )
        for name, units in result.items()
    }


def _through(model: nn.Module, batches: Iterable[Any], into: dict[str, Any], patches: Patches, seed: int) -> None:
    def visit(name: str, call: AffineCall, inputs: LayerInputs, live: Tensor | None) -> None:
        if name in into:
            into[name].add(inputs, live)

    inspect_layers(model, batches, visit, patches=patches, seed=seed, active=True)


def _passes(layers: Sequence[_LayerMoments], memory: int) -> list[dict[str, range]]:
    """Units by pass: small layers together, large ones in parts; at least one unit a pass."""
    passes: list[dict[str, range]] = []
    remaining = 0
    for layer in sorted(layers, key=lambda layer: layer.moments.width):
        each, start, units = (layer.moments.width // layer.groups) ** 2 * 8, 0, layer.units or 0
        while start < units:
            if remaining < each or not passes:
                passes.append({})
                remaining = memory
            stop = min(units, start + max(1, remaining // each))
            passes[-1][layer.name] = range(start, stop)
            remaining -= each * (stop - start)
            start = stop
    return passes


def _chosen(
    units: bool | Sequence[str], layers: dict[str, _LayerMoments], exact: int, results: dict[str, LayerRichness]
) -> list[_LayerMoments]:
    """Layers whose units can be judged; for the others the result says why not."""
    names = list(layers) if units is True else list(units)  # type: ignore[arg-type]
    for name in names:
        if name not in layers:
            raise InputError(f"units: the model has no layer {name!r}; it has {', '.join(layers)}")
    chosen = []
    for name in names:
        layer = layers[name]
        width = layer.moments.width // layer.groups
        if layer.units is None:
            results[name] = replace(results[name], units_why="what one unit sees is not known for this kind of layer")
        elif width > exact:
            results[name] = replace(results[name], units_why=f"wider than exact={exact}: raise exact to {width}")
        else:
            chosen.append(layer)
    return chosen


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and check_number(tolerance, "tolerance", 0, 1) == 1:
        raise InputError("tolerance: expected a number from 0 up to less than 1; got 1")


def _check(model: Any, patches: Any, **numbers: Any) -> None:
    check_weights(check_model(model))
    if patches is not None and not (isinstance(patches, str) and patches == "whole"):
        check_count(patches, "patches", also="None for all or 'whole'")
    for name, number in numbers.items():
        check_count(number, name)
