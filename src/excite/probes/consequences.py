"""What hyperparameters decide in advance, against what is measured: rotation per step, rank, lazy or rich training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from excite._core.calls import Pick
from excite._core.checks import check_count, check_number
from excite._core.wrappers import is_sharded
from excite.errors import InputError, ModelError
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext, Values
from excite.probes.conserved.laws import LawSums, NamedLaw
from excite.probes.distance import tensor_norms, trainable_parameters
from excite.probes.findings import Finding, MetricSeries, Panel, binned_median, finite, number
from excite.probes.update_ratio import StepCopy
from excite.wiring.groups import named
from excite.wiring.tracing import Wiring

_NEAR = 1.5  # measured over expected rotation, up to which it has settled
_ONE_SIDED = 0.5  # imbalance beyond which one side of a law holds most of its squares


def expected_rotation(group: Mapping[str, Any]) -> float | None:
    """Angle by which decay and learning rate turn a weight matrix per step once its norm is at equilibrium, in radians.

    √(2ηλ(1 − β₁)/(1 + β₁)) for AdamW, √(2ηλ/(1 + μ)) for SGD with momentum μ (Kosson, Messmer and Jaggi 2024). It holds for weights whose
    scale does not matter, as in front of a normalization.

    Args:
        group: Settings of an optimizer: lr, weight_decay and betas (with decoupled decay) or momentum.

    Returns:
        The angle; None for other optimizers, and without decay, where there is no equilibrium.

    Example:
        >>> from excite.probes.consequences import expected_rotation
        >>> round(expected_rotation({"lr": 0.1, "weight_decay": 0.05, "momentum": 0.0}), 6)
        0.1
    """
    rate, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    if rate * decay <= 0:
        return None
    if "betas" in group and group.get("decoupled_weight_decay"):
        first = float(group["betas"][0])
        return math.sqrt(2 * rate * decay * (1 - first) / (1 + first))
    if "dampening" in group:
        return math.sqrt(2 * rate * decay / (1 + float(group["momentum"])))
    return None


def rank_bound(batch: float, rate: float, decay: float, epsilon: float = 0.1) -> float:
    """B log(2/ε)/(ηλ): a rank within relative distance ε of which SGD with decay keeps a weight matrix (Galanti et al. 2025).

    Args:
        batch: Rank of one step's gradient at most: samples of a batch, times tokens or positions.
        rate: Learning rate η.
        decay: Weight decay λ.
        epsilon: Distance, relative to the spectral norm.

    Example:
        >>> from excite.probes.consequences import rank_bound
        >>> round(rank_bound(4, 0.1, 0.05))
        2397
    """
    return batch * math.log(2 / epsilon) / (rate * decay)


def turned(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """Angles between tensors before and after a step, (count,) in radians; accurate for small angles too."""
    start, end = tensor_norms(before), tensor_norms(after)
    moved = tensor_norms(torch._foreach_sub(list(after), list(before)))
    chord = (moved.square() - (end - start).square()).clamp_min(0) / (start * end)  # of unit vectors, squared
    return 2 * (chord.sqrt() / 2).clamp(max=1).asin()


class Consequences(Probe):
    """Rotation per step, rank and balance of the weight matrices, next to what the hyperparameters predict.

    Records, per weight matrix (convolutions as matrices with a row per output channel):
        ``consequences/angle/measured``: root mean square of the angles by which weight matrices turn in one step, in radians.
        ``consequences/angle/expected``: the same at equilibrium (`expected_rotation`); for AdamW, and SGD, with decay.
        ``consequences/rotation/LAYER``, ``consequences/expected/LAYER``: the two angles of each matrix.
        ``consequences/rank/LAYER``: number of singular values above `epsilon` times the largest.
        ``consequences/rank_bound/LAYER``: the rank that batch, learning rate and decay allow (`rank_bound`); with `batch=`, for SGD without
        momentum, with decay. Above the width of a matrix it says nothing.
        ``consequences/imbalance/LAW``: (Σ w² of what reads the channels − Σ w² of what makes them) over their sum, between −1 and 1. It is
        fixed by the initialization up to what decay and step size move. Near 1 the layers after do the learning in front of features that
        hardly move (lazy), near 0 and below features move (rich; Kunin et al. 2024, for one hidden layer). Needs an example.

    Angles compare the weights when ``optimizer.step`` begins with those in ``watch.step``. Before the norms have settled, a rotation above the
    expected one is usual. The study ``consequences`` tests the three predictions on grids of small trainings.

    Args:
        schedule: When to measure. Default: every 50 steps.
        batch: Samples of a training batch, times tokens or positions per sample, for the bound on the rank.
        epsilon: Size of the singular values that count, over the largest.
        max_width: Matrices whose smaller side is larger have no rank.
        output: Which part of the model's return value is the output; see `excite.trace`.

    Raises:
        InputError: If an argument is not what is expected.

    Example:
        >>> from excite.probes import Consequences, Every
        >>> probe = Consequences(Every(100), batch=128)
    """

    name = "consequences"
    reduction = "first"
    requires = ("optimizer",)
    runs_model = False
    panel = Panel(
        "consequences",
        "What the hyperparameters decide",
        "Rotation of the weights per step, next to the one that learning rate and weight decay lead to; rank of the weights, next to the "
        "bound from batch, rate and decay; and the balance of neighbouring layers, which says whether training is lazy (near 1) or "
        "rich.",
        (
            ("angle", "rotation per step (radians)"),
            ("rotation", "rotation of each layer"),
            ("expected", "expected rotation of each layer"),
            ("rank", "rank of the weights"),
            ("rank_bound", "bound on the rank"),
            ("imbalance", "imbalance of neighbours (1: lazy)"),
        ),
        order=46,
        docs="watch.md#what-hyperparameters-decide",
    )

    def __init__(
        self,
        schedule: Schedule | None = None,
        batch: int | None = None,
        epsilon: float = 0.1,
        max_width: int = 1024,
        output: Pick = None,
    ):
        super().__init__(Every(50) if schedule is None else schedule)
        self.batch = None if batch is None else check_count(batch, "Consequences: batch")
        self.epsilon = check_number(epsilon, "Consequences: epsilon", 0.0)
        if not 0 < self.epsilon < 1:
            raise InputError(f"Consequences: epsilon: expected a number between 0 and 1; got {epsilon}")
        self.max_width = check_count(max_width, "Consequences: max_width")
        self.output = output
        self._matrices: dict[str, Tensor] = {}
        self._before = StepCopy()
        self._laws: tuple[list[NamedLaw], LawSums, list[Tensor]] | None = None

    def attach(self, ctx: StepContext) -> None:
        """Finds the weight matrices and, with an example, the laws between them."""
        if is_sharded(ctx.model):
            raise ModelError("Consequences: the weights are sharded (FSDP): angles and ranks need whole matrices")
        parameters = trainable_parameters(ctx.model)
        self._matrices = {
            path: p for path, p in parameters.items() if p.dim() > 1 and p.numel() > max(len(p), p.shape[1:].numel())
        }
        if not self._matrices:
            raise ModelError("Consequences: the model has no weight matrix that is trained")
        self._before.attach(self._matrices, ctx.optimizer)
        if ctx.example is not None:
            self._laws = _laws(ctx.wiring(self.output), parameters)

    def detach(self) -> None:
        """Removes the hook and releases memory."""
        self._matrices, self._laws = {}, None
        self._before.detach()

    def announce(self, due: bool) -> None:
        """Called before each step with whether it will be measured."""
        self._before.announce(due)

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Measurement:
        """Measures angles and squares on the device; singular values follow in the background."""
        values: dict[str, float | Tensor] = {**self._rotations(ctx, self._before.pop()), **self._imbalances()}
        grams = {path: gram for path, p in self._matrices.items() if (gram := self._gram(p.detach())) is not None}
        bounds = self._bounds(ctx)
        host = [value for value in values.values() if not isinstance(value, float)]
        numbers = torch.stack([value.double().reshape(()) for value in host]) if host else torch.zeros(0)

        def compute() -> Values:
            fetched = iter(numbers.tolist())
            fetched_values = {
                name: value if isinstance(value, float) else next(fetched) for name, value in values.items()
            }
            return {**fetched_values, **self._ranks(grams, bounds)}

        return Deferred(compute) if numbers.device.type != "cpu" else compute()

    def _rotations(self, ctx: StepContext, before: Mapping[str, Tensor]) -> Values:
        if not before or ctx.optimizer is None:
            return {}
        angles = turned(list(before.values()), [self._matrices[path].detach() for path in before])
        groups = {id(p): group for group in ctx.optimizer.param_groups for p in group["params"]}
        values: dict[str, float | Tensor] = {"angle/measured": angles.square().mean().sqrt()}
        expected = {}
        for path, angle in zip(before, angles.unbind()):
            values[f"rotation/{_layer(path)}"] = angle
            group = groups.get(id(self._matrices[path]))
            if group is not None and (at_equilibrium := expected_rotation(group)) is not None:
                expected[path] = at_equilibrium
        if len(expected) == len(before):
            values["angle/expected"] = math.sqrt(sum(angle * angle for angle in expected.values()) / len(expected))
        values |= {f"expected/{_layer(path)}": angle for path, angle in expected.items()}
        return values

    def _gram(self, weight: Tensor) -> Tensor | None:
        """The Gram matrix of the smaller side, in float64; None of matrices that are too wide."""
        matrix = weight.flatten(1)
        matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        if len(matrix) > self.max_width:
            return None
        matrix = matrix.double()
        return matrix @ matrix.T

    def _ranks(self, grams: Mapping[str, Tensor], bounds: Mapping[str, float]) -> Values:
        values: dict[str, float] = {}
        for path, gram in grams.items():
            rank = math.nan  # where the training has diverged
            if bool(gram.isfinite().all()):
                squares = torch.linalg.eigvalsh(gram.cpu())
                rank = float((squares > self.epsilon**2 * squares[-1]).sum())
            values[f"rank/{_layer(path)}"] = rank
        return {**values, **{f"rank_bound/{_layer(path)}": bound for path, bound in bounds.items()}}

    def _bounds(self, ctx: StepContext) -> dict[str, float]:
        if self.batch is None or ctx.optimizer is None:
            return {}
        bounds: dict[str, float] = {}
        for group in ctx.optimizer.param_groups:
            rate, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
            if "dampening" not in group or group["momentum"] or rate * decay <= 0:
                continue
            members = {id(p) for p in group["params"]}
            bound = rank_bound(self.batch, rate, decay, self.epsilon)
            bounds |= {path: bound for path, p in self._matrices.items() if id(p) in members}
        return bounds

    def _imbalances(self) -> Values:
        if self._laws is None:
            return {}
        laws, sums, weights = self._laws
        made, read = sums.sides(sums.rows({"w": [p.detach() for p in weights]}, ["ww"])[0])
        values = {}
        for law in laws:
            before, after = made[law.span].sum(), read[law.span].sum()
            values[f"imbalance/{law.name}"] = (after - before) / (after + before)
        return values

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return [*_settled(history), *_lazy(history)]


def _layer(path: str) -> str:
    return path.removesuffix(".weight")


def _laws(wiring: Wiring, parameters: Mapping[str, Tensor]) -> tuple[list[NamedLaw], LawSums, list[Tensor]] | None:
    """Laws between weights that are all trained."""
    laws: list[NamedLaw] = []
    for name, group in named(wiring.groups):
        sites = (*group.producers, *group.consumers)
        if group.law in ("matrix", "channel") and group.consumers and all(s.parameter in parameters for s in sites):
            laws.append(NamedLaw(name, group, sum(law.group.channels for law in laws)))
    if not laws:
        return None
    device = next(iter(parameters.values())).device
    sums = LawSums(laws, {path: tuple(p.shape) for path, p in parameters.items()}, device)
    return laws, sums, [parameters[path] for path in sums.paths]


def _settled(history: MetricSeries) -> list[Finding]:
    measured, expected = (binned_median(history[f"consequences/angle/{key}"])[1] for key in ("measured", "expected"))
    if not len(measured) or not len(expected):
        return []
    current, at_equilibrium = float(measured[-1]), float(expected[-1])
    times = current / at_equilibrium
    compared = (
        "as learning rate and weight decay predict"
        if 1 / _NEAR < times < _NEAR
        else f"{number(times)} times what learning rate and weight decay lead to"
    )
    return [
        Finding("note", f"Weights turn by {number(current)} radians per step, {compared} ({number(at_equilibrium)}).")
    ]


def _lazy(history: MetricSeries) -> list[Finding]:
    last = {law: finite(series)[1] for law, series in history.layers("consequences/imbalance").items()}
    values = {law: float(series[-1]) for law, series in last.items() if len(series)}
    lazy = [law for law, value in values.items() if value > _ONE_SIDED]
    if not lazy:
        return []
    law = max(lazy, key=values.__getitem__)
    more = f" and {len(lazy) - 1} more" if len(lazy) > 1 else ""
    text = f"Behind {law}{more} the weights are much larger than in it (imbalance {number(values[law])}): its features move little."
    return [Finding("note", text)]
