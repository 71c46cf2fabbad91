"""The loss that the training loop reports, one value a step."""

from __future__ import annotations

from excite.probes.base import Probe, StepContext, Values


class Loss(Probe):
    """`loss/step`: the loss handed to `watch.step`, averaged over processes."""

    name = "loss"
    runs_model = False

    def measure(self, ctx: StepContext) -> Values:
        return {} if ctx.loss is None else {"step": ctx.loss}
