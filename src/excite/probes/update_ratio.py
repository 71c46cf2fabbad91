"""Size of one optimizer step relative to the weights, per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from excite.probes.base import Every, Probe, Schedule, StepContext, Values
from excite.probes.distance import LayerGroups, trainable_parameters
from excite.probes.findings import MAX_NAMED, MIN_VALUES, Finding, MetricSeries, Panel, binned_median, number

_LARGE = 0.1  # of the weights changed by one step: above it there is a warning


class UpdateRatio(Probe):
    """Relative size of an optimizer step, ‖w(t) − w(t − 1)‖₂ / ‖w(t − 1)‖₂ over the parameters of a layer.

    Records, for all trained parameters and per module that owns some:
        ``update/ratio[/LAYER]``: the ratio of the step that `watch.step` reports; NaN for a layer whose weights were all zero.

    Values around 1e-3 are common; a layer far above the others learns too fast, one far below hardly learns. The weights are
    copied after the step before, and compared in `watch.step`, so that everything between two calls of it counts as the step:
    accumulated micro-batches, weight decay, clipping, projections. A step that a ``GradScaler`` skips has the ratio 0.

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
        self._before: dict[str, Tensor] = {}  # weights before the coming step, if it will be measured
        self._groups = LayerGroups(())

    def attach(self, ctx: StepContext) -> None:
        """Finds the trainable parameters; called by `excite.watch`."""
        self._parameters = trainable_parameters(ctx.model)

    def detach(self) -> None:
        """Removes hooks and releases memory; called when the watch is closed."""
        self._parameters, self._before = {}, {}

    def announce(self, due: bool) -> None:
        """Called before each step with whether it will be measured."""
        self._before = {path: p.detach().clone() for path, p in self._parameters.items()} if due else {}

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Values:
        """Measures the change of each layer in the step, relative to its weights."""
        before, self._before = self._before, {}
        current = {path: p.detach() for path, p in self._parameters.items() if path in before}
        if not current:
            return {}
        if self._groups.paths != list(current):
            self._groups = LayerGroups(current)
        moved = self._groups.norms([current[path] - before[path] for path in current])
        sizes = self._groups.norms([before[path] for path in current])
        ratios = torch.where(sizes > 0, moved / sizes, torch.nan)
        return {f"ratio/{layer}" if layer else "ratio": r for layer, r in zip(self._groups.layers, ratios.unbind())}

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        found = []
        medians = {layer: binned_median(series)[1] for layer, series in history.layers("update/ratio").items()}
        last = {layer: float(values[-1]) for layer, values in medians.items() if len(values)}
        fast = [f"{layer} by {ratio:.0%}" for layer, ratio in last.items() if ratio > _LARGE]
        still = [layer for layer, values in medians.items() if len(values) >= MIN_VALUES and not values.any()]
        if fast:
            more = f" and {len(fast) - MAX_NAMED} more layers" if len(fast) > MAX_NAMED else ""
            text = f"One step changes the weights of {', '.join(fast[:MAX_NAMED])}{more} of their norm"
            found.append(Finding("warning", f"{text}: the learning rate is large for them."))
        if still:
            more = f" and {len(still) - MAX_NAMED} more" if len(still) > MAX_NAMED else ""
            found.append(Finding("warning", f"The weights of {', '.join(still[:MAX_NAMED])}{more} do not change."))
        total = binned_median(history["update/ratio"])[1]
        if len(total) and not fast:
            found.append(Finding("note", f"One step changes the weights by {number(float(total[-1]))} of their norm."))
        return found
