"""Norm of the gradient that the optimizer receives, per layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from excite.probes.base import Every, Probe, Schedule, StepContext, Values
from excite.probes.distance import LayerGroups, trainable_parameters
from excite.probes.findings import Finding, MetricSeries, Panel, binned_median, first_nonfinite, number, rise, since

_GREW = 0.9  # relative change of the norm above which there is a warning: ten times as large
_MAX_RATIO = 1e4  # between the largest and the smallest layer
_CLIP = "Clip gradients, or lower the learning rate."
_VANISH = "Use normalization, residual connections or another initialization, so that these layers are trained."


class GradientNorm(Probe):
    """Norm of the gradient of each layer, ‖∂L/∂w‖₂ over the parameters of the layer.

    Records, for all trained parameters and per module that owns some:
        ``gradient/norm[/LAYER]``: norm of the gradient as the optimizer receives it.

    With an optimizer (``excite.watch(..., optimizer=optimizer)``) the gradient is read when ``optimizer.step`` is called: summed over
    accumulated micro-batches, after clipping, and unscaled if a ``GradScaler`` is used. A step that the scaler skips has no
    value. With ``optimizer.step(closure)`` it is the gradient of the closure's last call. Without an optimizer ``p.grad`` is read in
    ``watch.step``, so gradients must not be set to zero before it, and include the factor of a scaler.

    Parameters without a gradient do not count. All processes hold the same gradients once DistributedDataParallel has averaged
    them, so the values of the first one are written; of sharded gradients the full norm is computed.

    Args:
        schedule: When to measure. Default: every 10 steps. Nothing is done at the steps between.

    Example:
        >>> import torch, excite
        >>> from excite.probes import GradientNorm, Loss
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> watch = excite.watch(model, optimizer=optimizer, probes=[Loss(), GradientNorm()])
    """

    name = "gradient"
    reduction = "first"
    runs_model = False
    panel = Panel(
        "gradients",
        "Gradient",
        "Norm of the gradient that the optimizer receives, for all parameters and per layer. Norms that differ by orders of "
        "magnitude between layers show vanishing or exploding gradients; a norm that keeps growing precedes divergence.",
        (("norm", "norm of the gradient"),),
        order=42,
        log=True,
        heatmap=True,
        docs="watch.md",
    )

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(10) if schedule is None else schedule)
        self._parameters: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._due = True
        self._norms: tuple[list[str], Tensor] | None = None  # layers and norms of the last optimizer step
        self._groups = LayerGroups(())

    def attach(self, ctx: StepContext) -> None:
        """Registers hooks on the optimizer that read gradients right before the update."""
        self._parameters = trainable_parameters(ctx.model)
        if ctx.optimizer is not None:
            self._handles = [
                ctx.optimizer.register_step_pre_hook(self._before_step),
                ctx.optimizer.register_step_post_hook(self._after_step),
            ]

    def detach(self) -> None:
        """Removes hooks and releases memory; called when the watch is closed."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters, self._norms = [], {}, None

    def announce(self, due: bool) -> None:
        """Called before each step with whether it will be measured."""
        self._due = due

    def measure(self, ctx: StepContext) -> Values:
        """Returns the norms that were read during the step."""
        if not self._handles:
            self._read(None)
        norms, self._norms = self._norms, None
        if norms is None or ctx.step == 0:
            return {}
        return {f"norm/{layer}" if layer else "norm": norm for layer, norm in zip(norms[0], norms[1].unbind())}

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._due and not _has_closure(args, kwargs):
            self._read(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._due and _has_closure(args, kwargs):
            self._read(optimizer)

    @torch.no_grad()
    def _read(self, optimizer: torch.optim.Optimizer | None) -> None:
        gradients = {path: p.grad for path, p in self._parameters.items() if p.grad is not None}
        if not gradients:
            self._norms = None
            return
        dense = [g.coalesce().values() if g.layout == torch.sparse_coo else g for g in gradients.values()]
        if self._groups.paths != list(gradients):
            self._groups = LayerGroups(gradients)
        norms = self._groups.norms(dense)
        scale = getattr(
            optimizer, "grad_scale", None
        )  # set by a GradScaler if the optimizer unscales inside its kernel
        self._norms = self._groups.layers, norms if scale is None else norms / scale.to(norms)

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        total = history["gradient/norm"]
        step, up = first_nonfinite(total), rise(total)
        if step is not None:
            return [Finding("warning", f"The gradient is not finite at step {step:,}.", _CLIP)]
        if up is None:
            return []
        result = []
        if up.before > 0 and up.clear and up.fraction > _GREW:
            text = f"The norm of the gradient grew from {number(up.before)} to {number(up.now)} {since(up)}"
            result.append(Finding("warning", f"{text}.", _CLIP))
        medians = {layer: binned_median(s)[1] for layer, s in history.layers("gradient/norm").items()}
        last = {layer: float(np.median(values[-3:])) for layer, values in medians.items() if len(values)}
        if last:
            low, high = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
            text = f"The norm of the gradient is {number(last[low])} in layer {low} and {number(last[high])} in layer {high}"
            # Where a layer before it gets more, as before queries and keys of small gradients, nothing vanishes on the way.
            before = list(last)[: list(last).index(low) + 1]
            if all(last[high] > _MAX_RATIO * last[layer] for layer in before):
                result.append(Finding("warning", f"{text}: gradients vanish on their way to {low}.", _VANISH))
            elif len(last) > 1:
                result.append(Finding("note", f"{text}, all others in between."))
        return result


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `optimizer.step`, the optimizer first, hold a closure."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
