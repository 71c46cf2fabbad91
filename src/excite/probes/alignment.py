"""How close each layer is to rank one, and how well neighbouring layers are aligned: Theorem 2 of Training invariances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from excite.errors import InputError
from excite.probes.aligned import Alignments, JunctionAlignment, LayerAlignment
from excite.probes.leading import Leading, leading_of
from excite.probes.protocol import Every, Moment, Probe, Schedule, Values
from excite.probes.spectrum import Between
from excite.wiring.calling import Batch, Pick
from excite.wiring.junctions import Junction, junctions, parameters_of, plain, plain_rows
from excite.wiring.layers import Layer
from excite.wiring.tracing import Wiring, trace

EXACT = 256


class Measure:
    """The matrices of a traced model, and where their subspace iterations stand."""

    def __init__(self, wiring: Wiring, exact: int, block: int):
        self.exact, self.block = exact, block
        self.layers = [one for one in _once(wiring.layers) if one.weight_name is not None]
        self.junctions = junctions(wiring)
        sites = [site for group in wiring.groups for site in group.producers if plain(site)]
        self._out = {site.parameter: site for site in sites}
        self.bases: dict[str, Tensor] = {}

    def matrices(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {one.name: self._matrix(one, parameters[one.weight_name or ""]) for one in self.layers}

    def _matrix(self, layer: Layer, weight: Tensor) -> Tensor:
        """Output channels as rows, whichever axis counts them."""
        site = self._out.get(layer.weight_name or "")
        if site is not None:
            return plain_rows(site, weight)
        return weight.flatten(1) if weight.dim() > 1 else weight[None]

    def look(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Leading], dict[str, tuple[Leading, Leading]]]:
        """By layer, and by junction for what makes and what reads its channels. A matrix that is a layer is done once."""
        matrices = self.matrices(parameters)
        layers = list(matrices)
        made = {}
        for junction in self.junctions:
            made[junction.name] = junction.made_by
            if len(junction.before) > 1 or junction.made_by not in layers:
                made[junction.name] = f"{junction.name}/made"
                matrices[made[junction.name]] = junction.made(parameters)
            matrices[f"{junction.name}/read"] = junction.read(parameters)
        bases = [self.bases.get(key) for key in matrices]
        found = dict(zip(matrices, leading_of(list(matrices.values()), bases, exact=self.exact, block=self.block)))
        self.bases |= {key: one.basis for key, one in found.items() if one.basis is not None}
        met = {name: (found[key], found[f"{name}/read"]) for name, key in made.items()}
        return {name: found[name] for name in layers}, met


def alignment(
    model: nn.Module, example: Batch, *, exact: int = EXACT, iterations: int = 10, output: Pick = None
) -> Alignments:
    """Rank of every layer and alignment of neighbouring ones, from the weights as they are; `example` is a batch as the model
    takes it, from which its wiring is read.

    Up to the smaller dimension `exact` from the whole spectrum; beyond by subspace iteration, in `iterations` rounds.
    """
    measure = Measure(trace(model, example, output=output), exact, 8)
    parameters = parameters_of(model)
    _check(parameters)
    for _ in range(max(1, iterations)):
        done, met = measure.look(parameters)
        if all(found.complete for found in (*done.values(), *(one for pair in met.values() for one in pair))):
            break
    shapes = {name: matrix.shape for name, matrix in measure.matrices(parameters).items()}
    return Alignments(
        tuple(_layer(name, tuple(shapes[name]), found) for name, found in done.items()),
        tuple(_junction(junction, *met[junction.name]) for junction in measure.junctions),
    )


def _layer(name: str, shape: tuple[int, ...], found: Leading) -> LayerAlignment:
    total, squares = float(found.total), [float(v) for v in found.squares]
    first = squares[0]
    ratio = min(1.0, first / total) if total > 0 else 0.0
    fourth = None if found.fourth is None else float(found.fourth)
    second = squares[1] if len(squares) > 1 else 0.0
    return LayerAlignment(
        name,
        (shape[0], shape[1]),
        first**0.5,
        total**0.5,
        ratio,
        1 / ratio if ratio else 0.0,
        None if fourth is None else total**2 / fourth if fourth else 0.0,
        _effective_rank(found),
        max(0.0, 2 - 2 * ratio**0.5) ** 0.5,
        1 - second / first if first else 0.0,
        float(found.residual),
    )


def _junction(junction: Junction, made: Leading, read: Leading) -> JunctionAlignment:
    ratio = float(made.squares[0] / made.total) if float(made.total) else 0.0
    return JunctionAlignment(junction.name, junction.law, float(_aligned(made, read)), ratio)


def _aligned(made: Leading, read: Leading) -> Tensor:
    """Of the vectors along the channels: rows of both matrices."""
    return (made.left.double() @ read.left.double()).abs().clamp(max=1.0)


def _effective_rank(found: Leading) -> Between:
    """exp of the entropy of σ²/Σσ². What the first k leave is spread over the others: evenly at most, and at least in
    pieces as large as the k-th."""
    if not float(found.total):
        return Between(0.0, 0.0)
    low, high = (float(v) for v in _entropies([found]))
    return Between(low, low) if found.complete else Between(low, high)


def _entropies(found: Sequence[Leading]) -> tuple[Tensor, Tensor]:
    """The ends of that range, of each; the same where all σ are known."""
    total = torch.stack([one.total for one in found]).clamp_min(torch.finfo(torch.float64).tiny)
    shares = pad_sequence([one.squares.double() for one in found], batch_first=True) / total[:, None]
    known = -torch.special.xlogy(shares, shares).sum(1)
    left = (1 - shares.sum(1)).clamp_min(0)
    rest = torch.tensor([max(1, one.small - len(one.squares)) for one in found], dtype=torch.float64)
    last = torch.stack([one.squares[-1].double() for one in found]) / total
    partial = torch.tensor([not one.complete for one in found], dtype=torch.float64)
    left, rest = left * partial.to(left.device, non_blocking=True), rest.to(left.device, non_blocking=True)
    low = known - left * last.clamp(min=1e-300).log()
    high = known - torch.special.xlogy(left, left / rest)
    return torch.minimum(low, high).exp(), high.exp()


class Alignment(Probe):
    """Every 100 steps, of each layer: `alignment/ratio/layer`, `stable_rank`, `participation`, `distance` (see
    `LayerAlignment`) and `effective_rank`, or `effective_rank_low` and `_high` where only the first singular values are
    known; of each junction `alignment/aligned/a>b`.

    Layers whose smaller dimension is above `exact` (256, or 32 on a GPU) by subspace iteration that goes on from where the
    last measurement, or checkpoint, left it. Needs an example batch, for the wiring.
    """

    name = "alignment"
    reduction = "first"  # every process holds the same weights

    def __init__(self, schedule: Schedule | None = None, exact: int | None = None, block: int = 8, output: Pick = None):
        super().__init__(schedule or Every(100))
        if (exact is not None and exact < 1) or block < 2:
            raise InputError(f"Alignment: expected exact of at least 1 and block of at least 2; got {exact}, {block}")
        self.exact, self.block, self.output = exact, block, output
        self._measure: Measure | None = None
        self._stored: dict[str, Tensor] = {}

    def attach(self, now: Moment) -> None:
        if now.example is None:
            raise InputError("the alignment probe needs an example batch: excite.watch(model, example=x, ...)")
        gpu = any(p.is_cuda for p in now.model.parameters())
        exact = self.exact if self.exact is not None else 32 if gpu else EXACT
        self._measure = Measure(now.wiring(self.output), exact, self.block)
        self._measure.bases |= self._stored

    def measure(self, now: Moment) -> Values:
        if self._measure is None:
            raise InputError("the alignment probe is not attached: use it through excite.watch")
        values: dict[str, Tensor] = {}
        parameters = parameters_of(now.model)
        with torch.no_grad():
            done, met = self._measure.look(parameters)
            values |= _values(done)
            values |= {f"aligned/{name}": _aligned(made, read) for name, (made, read) in met.items()}
        return values

    def state_dict(self) -> dict[str, Any]:
        bases = self._measure.bases if self._measure is not None else self._stored
        return {"bases": {key: basis.clone() for key, basis in bases.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stored = dict(state["bases"])
        if self._measure is not None:
            self._measure.bases = dict(self._stored)


def _values(found: Mapping[str, Leading]) -> dict[str, Tensor]:
    """As `_layer`, of all layers at once and without waiting for the device. A matrix of zeros has ratio 0."""
    tiny = torch.finfo(torch.float64).tiny
    total = torch.stack([one.total for one in found.values()])
    ratio = (torch.stack([one.squares[0].double() for one in found.values()]) / total.clamp_min(tiny)).clamp(max=1.0)
    columns = {
        "ratio": ratio,
        "stable_rank": 1 / ratio.clamp_min(tiny),
        "distance": (2 - 2 * ratio.sqrt()).clamp_min(0).sqrt(),
    }
    values = {f"{key}/{name}": v for key, column in columns.items() for name, v in zip(found, column.unbind())}
    known = {name: one for name, one in found.items() if one.fourth is not None}
    if known:
        squares = torch.stack([one.total for one in known.values()]).square()
        below = torch.stack([one.fourth for one in known.values() if one.fourth is not None]).clamp_min(tiny)
        values |= {f"participation/{name}": v for name, v in zip(known, (squares / below).unbind())}
    for (name, one), low, high in zip(found.items(), *(ends.unbind() for ends in _entropies(list(found.values())))):
        both = {"effective_rank": low} if one.complete else {"effective_rank_low": low, "effective_rank_high": high}
        values |= {f"{key}/{name}": value for key, value in both.items()}
    return values


def _once(layers: tuple[Layer, ...]) -> list[Layer]:
    return list({one.weight_name: one for one in reversed(layers)}.values())[::-1]


def _check(parameters: Mapping[str, Tensor]) -> None:
    for path, value in parameters.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"parameter {path!r} holds numbers that are not finite")
