"""The flight recorder: gradients, updates, moments and the residual stream at every step, and a report when the loss spikes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from excite._core.background import drain
from excite._core.checks import check_count, check_flag, check_number
from excite._core.distributed import local_shard, rank_and_size
from excite._core.preserve import device_of, probes_ignored
from excite.errors import InputError
from excite.probes.base import Deferred, Measurement, Probe, StepContext, Values
from excite.probes.distance import LayerGroups, trainable_parameters
from excite.probes.findings import Finding, MetricSeries, Panel, finite, number
from excite.probes.flight_recorder.event import LABELS
from excite.probes.flight_recorder.history import FlightHistory
from excite.probes.flight_recorder.norms import SampledTensors, ShardSums, norms
from excite.probes.flight_recorder.spikes import SpikeRule
from excite.probes.vital_signs.adam_moments import moments
from excite.probes.vital_signs.attention_logits import head_calls
from excite.probes.vital_signs.blocks import blocks, stream
from excite.probes.vital_signs.sample import SEQUENCES, SHARED

_FLUSH = 10  # steps between two transfers to the host


class FlightRecorder(Probe):
    """Keeps the last steps of a training in memory, and reports which layer moved first when the loss spikes.

    At every step it notes the norm of the gradient, ‖Δw‖/‖w‖, Adam's ‖m‖ and ‖√v‖ per layer (module that owns parameters) and the root
    mean square of the residual stream after each block, on two or three sequences of the batch, on the device; ten steps at a time are
    read in the background. Norms of tensors with more than 65,536 entries are estimated from eight blocks of 4,096 entries,
    spread evenly, except for the gradient, whose norm is exact.

    The loss spikes if the smallest of the last `recent` losses exceeds the mean of the `past` losses before by more than `least` and by
    more than `sigmas` of their standard deviations, or if it is not finite. Then
        ``artifacts/spike-STEP.json`` has the report: who moved first, by how many steps it led the loss, curves around the event,
        what is known to help;
        ``recorder/lead/QUANTITY/LAYER`` has the number of steps by which the first mover led the loss, at the step of the spike;
        ``recorder/gradient``, ``recorder/update``, ``recorder/m``, ``recorder/v``, ``recorder/residual`` with ``/LAYER`` have the curves
        around it, of the whole network and of the first movers;
        and one line says so. One line also warns if a layer leaves its usual range while the loss has not.

    With several processes the loss and the residual stream are those of the first; of sharded weights the full norms are
    computed. Hooks on the blocks become part of a compiled graph and add no graph break.

    Args:
        steps: Number of steps that are kept.
        recent: Steps of the short window.
        past: Steps of the long window.
        sigmas: Number of standard deviations.
        least: Smallest rise of the loss that counts.
        warn: Whether to warn before the loss spikes.
        residual: Whether to note the residual stream, which takes hooks on the blocks.

    Raises:
        InputError: If an argument is not what is expected, or `steps` is less than `recent + past`.

    Example:
        >>> from excite.probes import FlightRecorder, Loss
        >>> probes = [Loss(), FlightRecorder(steps=500, past=200)]
    """

    name = "recorder"
    reduction = "first"
    runs_model = False
    requires = ("optimizer",)
    at_end = True
    panel = Panel(
        "recorder",
        "Flight recorder",
        "The steps around spikes of the loss, of the whole network and of the layers that moved first.",
        (
            ("update", "‖Δw‖ / ‖w‖"),
            ("gradient", "norm of the gradient"),
            ("m", "‖m‖"),
            ("v", "‖√v‖"),
            ("residual", "residual stream, root mean square"),
            ("lead", "steps by which the first mover led the loss"),
        ),
        order=12,
        log=True,
        hidden=("spikes",),
        docs="language-models.md#flight-recorder",
    )

    def __init__(
        self,
        steps: int = 200,
        recent: int = 5,
        past: int = 100,
        sigmas: float = 6.0,
        least: float = 0.05,
        warn: bool = True,
        residual: bool = True,
    ):
        super().__init__()
        self.steps = check_count(steps, "FlightRecorder: steps", 2)
        self.rule = SpikeRule(
            check_count(recent, "FlightRecorder: recent"),
            check_count(past, "FlightRecorder: past", 4),
            check_number(sigmas, "FlightRecorder: sigmas", 0.0),
            check_number(least, "FlightRecorder: least", 0.0),
        )
        if self.steps < self.rule.recent + self.rule.past:
            needed = self.rule.recent + self.rule.past
            raise InputError(f"FlightRecorder: steps: expected at least recent + past = {needed}; got {steps}")
        self.warn, self.residual = (
            check_flag(warn, "FlightRecorder: warn"),
            check_flag(residual, "FlightRecorder: residual"),
        )
        self._parameters: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._blocks: list[str] = []
        self._history: FlightHistory | None = None
        self._written: dict[str, int] = {}  # last step of each curve in the run
        self._gradients: Tensor | None = None
        self._norms: _LayerNorms | None = None

    def attach(self, ctx: StepContext) -> None:
        """Registers hooks on the optimizer and the blocks, and allocates the record."""
        if ctx.optimizer is None:
            raise InputError("FlightRecorder: expected an optimizer: excite.watch(..., optimizer=optimizer)")
        self._parameters = trainable_parameters(ctx.model)
        self._norms = _LayerNorms(self._parameters)
        device = device_of(ctx.model)
        modules = blocks(ctx.model) if self.residual and not _recomputes(ctx.model) else {}
        self._blocks = list(modules)
        self._rms = torch.full((len(modules),), math.nan, device=device)
        self._register(ctx, modules)
        layers = self._norms.groups.layers
        columns = [(quantity, layer) for quantity in ("gradient", "update", "m", "v") for layer in layers]
        columns += [("residual", path) for path in self._blocks]
        self._history = FlightHistory(columns, self.rule, self.steps, self.warn)
        self._ring = torch.full((_FLUSH, len(columns) + 1), math.nan, dtype=torch.float64, device=device)
        self._host: list[tuple[int, float | None, float]] = []  # step, loss if it is on the host, learning rate
        self._heads: tuple[int, list[str], Tensor] | None = None

    def _register(self, ctx: StepContext, modules: Mapping[str, nn.Module]) -> None:
        if modules and self._rms.is_cuda:  # a CUDA graph may write to it
            torch._dynamo.mark_static_address(self._rms)
        self._handles = [ctx.optimizer.register_step_pre_hook(self._before_step)]  # type: ignore[union-attr]
        for i, module in enumerate(modules.values()):
            self._handles.append(module.register_forward_hook(_rms_hook(self._rms, i)))

    @property
    def history(self) -> FlightHistory | None:
        """The steps that are kept; None before the recorder is attached."""
        return self._history

    def detach(self) -> None:
        """Removes hooks and releases memory; called when the watch is closed."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters, self._gradients, self._norms = [], {}, None, None

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._norms is not None:
            scale = getattr(optimizer, "grad_scale", None)
            squares = self._norms.gradients()
            self._gradients = squares if scale is None else squares / scale.to(squares).square()

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Measurement:
        """Notes the step; every ten steps the record is read in the background."""
        if self._history is None or self._norms is None or ctx.optimizer is None:
            return {}
        self._history.roles = ctx.roles
        if not ctx.final and ctx.step:
            self._note(ctx, ctx.optimizer, self._norms)
        elif ctx.step == 0:
            self._norms.copy_weights()
        sample = ctx.shared.get(SHARED)
        if sample is not None and sample.attention:
            names = [f"{name}/head{i}" for name, call in head_calls(sample.attention) for i in range(len(call.largest))]
            self._heads = (ctx.step, names, torch.cat([call.largest for call in sample.attention]))
        result: Measurement = {}
        if ctx.final or len(self._host) == _FLUSH:
            rows, host, heads = self._ring[: len(self._host)].clone(), self._host, self._heads
            self._host, self._heads = [], None
            compute = partial(self._read, rows, host, heads, ctx.final)
            if ctx.final:
                drain()  # earlier steps first
            result = compute() if ctx.final or rows.device.type == "cpu" else Deferred(compute)
        self._hand_over(ctx, self._history)
        return result

    def _note(self, ctx: StepContext, optimizer: torch.optim.Optimizer, layers: _LayerNorms) -> None:
        loss = ctx.loss
        on_host = loss is None or loss.device != self._ring.device or loss.device.type == "cpu"
        value = None if loss is None else float(loss) if loss.device.type == "cpu" else math.nan
        self._host.append((ctx.step, value if on_host else None, _rate(optimizer)))
        squares = [self._gradients if self._gradients is not None else layers.nothing(), *layers.state(optimizer)]
        gradient, moved, size, m, v = layers.totals(squares)
        row = [
            loss.double().reshape(1) if loss is not None and not on_host else self._ring.new_full((1,), math.nan),
            gradient,
            torch.where(size > 0, moved / size, math.nan),
            m,
            v,
            self._rms.double(),
        ]
        torch.cat(row, out=self._ring[len(self._host) - 1])
        self._gradients = None

    def _read(self, rows: Tensor, host: list[tuple[int, float | None, float]], heads: Any, final: bool) -> Values:
        """On the host, in the background: adds the steps and searches them for spikes."""
        history = self._history
        if history is None or rank_and_size()[0] != 0:
            return {}
        table = rows.cpu().numpy()
        count = history.count
        if heads is not None:
            history.add_heads(heads[0], dict(zip(heads[1], heads[2].tolist())))
        for (step, loss, rate), row in zip(host, table):
            history.add(step, float(row[0]) if loss is None else loss, rate, np.array(row[1:]))
        if final:
            history.finish()
        return {"spikes": float(history.count)} if history.count > count else {}

    def _hand_over(self, ctx: StepContext, history: FlightHistory) -> None:
        """What was found in the background goes to the run."""
        while history.messages:
            ctx.messages.append(history.messages.pop(0))
        while history.events:
            event = history.events.pop(0)
            ctx.artifacts[f"spike-{event.step}"] = event.to_dict()
            if event.first is not None:
                name = "/".join(filter(None, (event.first.quantity, event.first.layer)))
                ctx.earlier.append((event.step, {f"recorder/lead/{name}": float(event.first.lead)}))
            for i, step in enumerate(event.curves["step"]):
                values = {
                    f"recorder/{name}": curve[i] for name, curve in event.curves.items() if name not in ("step", "loss")
                }
                fresh = {
                    name: value
                    for name, value in values.items()
                    if value is not None and self._fresh(name, int(step or 0))
                }
                ctx.earlier.append((int(step or 0), fresh))

    def _fresh(self, name: str, step: int) -> bool:
        """Whether a curve has no value at this step or later yet."""
        if self._written.get(name, -1) >= step:
            return False
        self._written[name] = step
        return True

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        result = []
        for name, series in history.layers("recorder/lead").items():
            quantity, _, layer = name.partition("/")
            of_layer = f" of {layer}" if layer else ""
            for step, lead in zip(*finite(series)):
                when = (
                    f"{number(lead)} step{'s' if lead > 1 else ''} before the loss"
                    if lead > 0
                    else "with the loss"
                    if lead == 0
                    else "after the loss"
                )
                text = f"The loss spiked at step {int(step):,}; first {LABELS.get(quantity, quantity)}{of_layer} moved, {when}."
                result.append(Finding("warning", text, "Use QK-norm, a smaller β₂ or a lower rate at that layer."))
        return result


class _LayerNorms:
    """Sums of squares of gradients, updates, weights and moments, by parameter; then by layer."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        self.parameters = dict(parameters)
        self.groups = LayerGroups(parameters)
        self._weights = SampledTensors(parameters)
        self._reduce = ShardSums(list(parameters.values()))
        self._before = self._weights.read().clone()
        self._size = self._weights.sums(self._before, 2)
        self._moments: tuple[SampledTensors, SampledTensors] | None = None
        self._places: dict[str, tuple[list[str], Tensor]] = {}

    def nothing(self) -> Tensor:
        """NaN for every parameter."""
        return torch.full((len(self.parameters),), math.nan, dtype=torch.float64, device=self._before.device)

    def copy_weights(self) -> None:
        """Keeps the weights before the coming step."""
        self._before.copy_(self._weights.read())
        self._size = self._weights.sums(self._before, 2)

    def gradients(self) -> Tensor:
        """‖g‖² of every parameter, 0 for those without a gradient."""
        gradients = {path: p.grad for path, p in self.parameters.items() if p.grad is not None}
        if not gradients:
            return self.nothing()
        dense = [local_shard(g.coalesce().values() if g.layout == torch.sparse_coo else g) for g in gradients.values()]
        return self._for_all("gradients", list(gradients), norms(dense, 2).square())

    def state(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Of every parameter ‖Δw‖² since the last call, ‖w‖² before it, ‖m‖² and ‖√v‖²."""
        weights = self._weights.read()
        moved = self._weights.sums(self._before.sub_(weights), 2)
        self._before.copy_(weights)
        size, self._size = self._size, self._weights.sums(weights, 2)
        by_path = moments(optimizer, self.parameters)
        if not by_path:
            return [moved, size, self.nothing(), self.nothing()]
        first, second = [m for m, _ in by_path.values()], [v for _, v in by_path.values()]
        if self._moments is None or not self._moments[0].same(first) or not self._moments[1].same(second):
            self._moments = SampledTensors(dict(zip(by_path, first))), SampledTensors(dict(zip(by_path, second)))
        sums = [tensors.sums(tensors.read(), order) for tensors, order in zip(self._moments, (2, 1))]
        return [moved, size, *(self._for_all("moments", list(by_path), values) for values in sums)]

    def _for_all(self, name: str, paths: list[str], values: Tensor) -> Tensor:
        """Values of some parameters at the places of all, 0 for the others. Positions are cached: sending them would wait."""
        if len(paths) == len(self.parameters):
            return values
        known = self._places.get(name)
        if known is None or known[0] != paths:
            places = [list(self.parameters).index(path) for path in paths]
            known = self._places[name] = paths, torch.tensor(places, device=values.device)
        return values.new_zeros(len(self.parameters)).index_copy_(0, known[1], values)

    def totals(self, squares: list[Tensor]) -> tuple[Tensor, ...]:
        """√Σ by layer, of sums of squares by parameter, over all processes that hold shards."""
        return self.groups.roots(self._reduce(torch.stack(squares)).T).T.unbind()


def _rms_hook(rms: Tensor, i: int) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and probes_ignored()):
            return
        x = stream(output)
        if x is not None:
            step = max(1, x.shape[0] // SEQUENCES)
            rms[i].copy_(x.detach()[::step].float().square().mean().sqrt())

    return note


def _recomputes(model: nn.Module) -> bool:
    """Whether blocks are recomputed in the backward pass: a hook that writes is not allowed in there when compiled."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """The median learning rate of the parameter groups; NaN if one is on a device."""
    rates = [group.get("lr", math.nan) for group in optimizer.param_groups]
    if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
        return math.nan
    return float(np.median([float(rate) for rate in rates])) if rates else math.nan
