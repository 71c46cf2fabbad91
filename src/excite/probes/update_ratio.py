"""Size of one optimizer step relative to the weights, per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from excite._core.preserve import capturing
from excite.probes.base import Every, Probe, Schedule, StepContext, Values
from excite.probes.distance import LayerGroups, trainable_parameters
from excite.probes.findings import MAX_NAMED, MIN_VALUES, Finding, MetricSeries, Panel, binned_median, number

_LARGE = 0.1  # of the weights changed by one step: above it there is a warning


class StepCopy:
    """A copy of some parameters from before the step that is measured, taken when `optimizer.step` begins.

    By then the activations of the step are freed, so that the copy does not add to the peak memory of the training. Without an
    optimizer, and where its hooks do not run because the step is replayed from a CUDA graph, the copy is taken after the step before.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._due, self._begun = False, False  # the coming step is measured; a hook ran in the last one
        self._handle: RemovableHandle | None = None

    def attach(self, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None) -> None:
        """Takes the parameters by path, and registers a hook on the optimizer."""
        self._parameters = dict(parameters)
        self._handle = None if optimizer is None else optimizer.register_step_pre_hook(self._before_step)

    def detach(self) -> None:
        """Removes the hook and releases memory."""
        if self._handle is not None:
            self._handle.remove()
        self._parameters, self._copies, self._handle = {}, {}, None

    def announce(self, due: bool) -> None:
        """Called after each step with whether the coming one will be measured."""
        self._copies = {}
        if due and not self._begun:
            self._copy()
        self._due, self._begun = due, False

    def pop(self) -> dict[str, Tensor]:
        """Returns the copies by path and forgets them; none if the step was not announced."""
        copies, self._copies = self._copies, {}
        return copies

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if capturing():
            return
        self._begun = True
        if self._due and not self._copies:
            self._copy()

    def _copy(self) -> None:
        self._copies = dict(zip(self._parameters, copies(list(self._parameters.values()))))


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors, by a few kernels for all of them where they are plain."""
    if all(type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and t.dtype in _FLOATS for t in tensors):
        return list(torch._foreach_mul(tensors, 1.0)) if tensors else []
    return [t.detach().clone() for t in tensors]


class UpdateRatio(Probe):
    """Relative size of an optimizer step, ‖w(t) − w(t − 1)‖₂ / ‖w(t − 1)‖₂ over the parameters of a layer.

    Records, for all trained parameters and per module that owns some:
        ``update/ratio[/LAYER]``: the ratio of the step that `watch.step` reports; NaN for a layer whose weights were all zero.

    Values around 1e-3 are common; a layer far above the others learns too fast, one far below hardly learns. The weights are
    copied when ``optimizer.step`` begins (without an optimizer, after the step before), and compared in `watch.step`, so that
    everything between counts as the step: weight decay, projections. A step that a ``GradScaler`` skips has no value, or the
    ratio 0 where it is compared with the step before.

    All processes hold the same weights, so the values of the first one are written; of sharded weights the full norm is computed.

    Args:
        schedule: When to measure. Default: every 10 steps. Between, nothing is done and no copy is held.

    Example:
        >>> import torch, excite
        >>> from excite.probes import Loss, UpdateRatio
        >>> watch = excite.watch(torch.nn.Linear(2, 1), probes=[Loss(), UpdateRatio()])
    """

    name = "update"
    reduction = "first"
    runs_model = False
    panel = Panel(
        "updates",
        "Update size",
        "How far one optimizer step moves the weights, relative to their norm. Values around 0.001 are common; a layer far above "
        "the others learns too fast, one far below hardly learns.",
        (("ratio", "‖Δw‖ / ‖w‖ of one step"),),
        order=44,
        log=True,
        heatmap=True,
        docs="watch.md",
    )

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(10) if schedule is None else schedule)
        self._parameters: dict[str, Tensor] = {}
        self._before = StepCopy()
        self._groups = LayerGroups(())

    def attach(self, ctx: StepContext) -> None:
        """Finds the trainable parameters; called by `excite.watch`."""
        self._parameters = trainable_parameters(ctx.model)
        self._before.attach(self._parameters, ctx.optimizer)

    def detach(self) -> None:
        """Removes hooks and releases memory; called when the watch is closed."""
        self._parameters = {}
        self._before.detach()

    def announce(self, due: bool) -> None:
        """Called before each step with whether it will be measured."""
        self._before.announce(due)

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Values:
        """Measures the change of each layer in the step, relative to its weights."""
        before = self._before.pop()
        current = {path: p for path, p in self._parameters.items() if path in before}
        if not current:
            return {}
        if self._groups.paths != list(current):
            self._groups = LayerGroups(current)
        sizes = self._groups.norms([before[path] for path in current])
        old = [before[path] for path in current]
        torch._foreach_sub_(old, list(current.values()))
        moved = self._groups.norms(old)
        ratios = torch.where(sizes > 0, moved / sizes, torch.nan)
        return {f"ratio/{layer}" if layer else "ratio": r for layer, r in zip(self._groups.layers, ratios.unbind())}

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        results = []
        medians = {layer: binned_median(series)[1] for layer, series in history.layers("update/ratio").items()}
        last = {layer: float(values[-1]) for layer, values in medians.items() if len(values)}
        fast = [f"{layer} by {ratio:.0%}" for layer, ratio in last.items() if ratio > _LARGE]
        still = [layer for layer, values in medians.items() if len(values) >= MIN_VALUES and not values.any()]
        if fast:
            more = f" and {len(fast) - MAX_NAMED} more layers" if len(fast) > MAX_NAMED else ""
            text = f"One step changes the weights of {', '.join(fast[:MAX_NAMED])}{more} of their norm"
            results.append(
                Finding(
                    "warning",
                    f"{text}: the learning rate is large for them.",
                    "Lower the learning rate, or warm it up.",
                )
            )
        if still:
            more = f" and {len(still) - MAX_NAMED} more" if len(still) > MAX_NAMED else ""
            results.append(
                Finding(
                    "warning",
                    f"The weights of {', '.join(still[:MAX_NAMED])}{more} do not change.",
                    "Check that they are trained: in the optimizer, with requires_grad, and reached by the loss.",
                )
            )
        total = binned_median(history["update/ratio"])[1]
        if len(total) and not fast:
            results.append(
                Finding("note", f"One step changes the weights by {number(float(total[-1]))} of their norm.")
            )
        return results
