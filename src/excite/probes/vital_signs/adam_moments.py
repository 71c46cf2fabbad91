"""Norms of Adam's moments, per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from excite.errors import InputError
from excite.probes.base import Every, Probe, Schedule, StepContext, Values
from excite.probes.distance import LayerGroups, tensor_norms, trainable_parameters
from excite.probes.findings import Finding, MetricSeries, Panel, number, rise, since


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps two moments as Adam does, from its settings."""
    return "betas" in optimizer.defaults


def moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """First and second moments (m, v) of the parameters that have them, by path."""
    by_path = {}
    for path, p in parameters.items():
        state: Mapping[str, Any] = optimizer.state.get(p, {})
        m, v = state.get("exp_avg"), state.get("exp_avg_sq")
        if isinstance(m, Tensor) and isinstance(v, Tensor):
            by_path[path] = (m, v)
    return by_path


class AdamMoments(Probe):
    """Norms of Adam's moments, over the parameters of a layer.

    Records, for all trained parameters and per module that owns some:
        ``adam/m[/LAYER]``: ‖m‖₂ of the first moment, without bias correction.
        ``adam/v[/LAYER]``: ‖√v‖₂ of the second moment, without bias correction.

    An update norm that doubles because ‖m‖ does, with ‖√v‖ unchanged, has preceded loss spikes. Works for every optimizer that keeps
    ``exp_avg`` and ``exp_avg_sq`` (Adam, AdamW, RAdam, NAdam). All processes hold the same moments, so the values of the first
    one are written; of sharded moments the full norm is computed.

    Args:
        schedule: When to measure. Default: every 10 steps.

    Example:
        >>> from excite.probes import AdamMoments, Every
        >>> probe = AdamMoments(Every(50))
    """

    name = "adam"
    reduction = "first"
    runs_model = False
    requires = ("optimizer",)
    panel = Panel(
        "adam",
        "Moments of Adam",
        "Norms of the first moment and of the root of the second, per layer. The size of an update is their ratio: a first moment "
        "that doubles while the second stays has preceded loss spikes.",
        (("m", "‖m‖"), ("v", "‖√v‖")),
        order=45,
        log=True,
        heatmap=True,
        docs="language-models.md#vital-signs",
    )

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(10) if schedule is None else schedule)
        self._parameters: dict[str, Tensor] = {}
        self._groups = LayerGroups(())

    def attach(self, ctx: StepContext) -> None:
        """Finds the trainable parameters; refuses optimizers without moments."""
        if ctx.optimizer is None or not is_adam(ctx.optimizer):
            got = "none" if ctx.optimizer is None else type(ctx.optimizer).__name__
            raise InputError(
                f"expected an optimizer with Adam's moments, such as AdamW; got {got}: leave AdamMoments out"
            )
        self._parameters = trainable_parameters(ctx.model)

    def detach(self) -> None:
        """Releases memory; called when the watch is closed."""
        self._parameters = {}

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Values:
        """Measures the norms of the moments."""
        if ctx.optimizer is None:
            return {}
        adam = moments(ctx.optimizer, self._parameters)
        if not adam:
            if ctx.step and ctx.optimizer.state:
                state_keys = sorted({key for state in ctx.optimizer.state.values() for key in state})
                raise InputError(
                    f"expected moments exp_avg and exp_avg_sq in the optimizer; got {', '.join(state_keys)}"
                )
            return {}
        if self._groups.paths != list(adam):
            self._groups = LayerGroups(adam)
        first = self._groups.norms([m for m, _ in adam.values()])
        second = self._groups.roots(tensor_norms([v for _, v in adam.values()], order=1))  # ‖√v‖² = ‖v‖₁: no copy of v
        return {
            f"{quantity}/{layer}" if layer else quantity: value
            for quantity, norms in (("m", first), ("v", second))
            for layer, value in zip(self._groups.layers, norms.unbind())
        }

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        up, second = rise(history["adam/m"]), rise(history["adam/v"])
        if up is None or not up.large or up.ratio < 2 or (second is not None and second.ratio > 1.5):
            return []
        return [Finding("warning", f"The norm of Adam's first moment grew from {number(up.before)} to {number(up.now)} {since(up)} "
                                   "while the second hardly changed: updates grow.", "Lower β₂ or the learning rate.")]  # fmt: skip
