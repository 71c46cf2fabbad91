"""The loss that the training loop reports, one value per step."""

from __future__ import annotations

import numpy as np

from excite._core.calls import Pick
from excite.probes.base import Probe, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, binned_median, first_nonfinite, noise, number, rise


class Loss(Probe):
    """The loss passed to watch.step, averaged over processes.

    Records:
        ``loss/step``: the loss, at every step.

    Args:
        schedule: When to record it. Default: every step.

    Example:
        >>> from excite.probes import Loss
        >>> with excite.watch(model, run="runs/loss", probes=[Loss()]) as watch:
        ...     watch.step(0.5)
        >>> excite.load_run("runs/loss").series("loss/step")[1].tolist()
        [0.5]
    """

    name = "loss"
    panel = Panel(
        "losses",
        "Loss",
        "The loss passed to watch.step, averaged over the last 2 % of steps; the faint line of a single run is every step, "
        "at its highest and lowest. Losses of different ways of training are not comparable: excited ones are worst-case "
        "errors and stay higher.",
        (("step", "loss"),),
        order=10,
        log=True,
        docs="serve.md#diverged-runs",
    )
    runs_model = False

    def measure(self, ctx: StepContext) -> Values:
        """Returns the loss that was given to `watch.step`."""
        return {} if ctx.loss is None else {"step": ctx.loss}

    @classmethod
    def default(cls, output: Pick = None) -> Loss:
        """Returns the probe as `default_probes` uses it."""
        return cls()

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return [*_nonfinite(history), *_loss(history)]


def _nonfinite(history: MetricSeries) -> list[Finding]:
    step = first_nonfinite(history["loss/step"])
    if step is None:
        return []
    return [Finding("warning", f"The loss is not a finite number at step {step:,}: training has broken down there.",
                    "Lower the learning rate or the radius, or clip gradients.")]  # fmt: skip


def _loss(history: MetricSeries) -> list[Finding]:
    steps, values = binned_median(history["loss/step"])
    if len(steps) < 2:
        return []
    start, low, last = float(values[0]), float(values.min()), float(values[-1])
    up = rise(history["loss/step"])
    if up is not None and last > start and up.large:
        return [Finding("warning", f"The loss has risen from {number(up.before)} to {number(last)} since step {up.since:,}, "
                                  "above where it began: training diverges.",
                        "Lower the learning rate or the radius, or clip gradients.")]  # fmt: skip
    noise_level, first = noise(values), float(history["loss/step"][1][0])
    # The first bin hides a jump at the first steps, as of a training that diverges at once.
    jump = f" It jumped there from {number(first)} at the first step." if start > 10 * abs(first) else ""
    if np.isfinite(noise_level) and abs(last - start) <= 3 * noise_level:
        text = f"The loss did not change beyond its noise: {number(start)} at first, {number(last)} now.{jump}"
        return [Finding("note", text)]
    text = f"The loss went from {number(start)} to {number(last)}"
    if up is not None and up.large:
        text += f"; it has been lower, {number(low)} at step {up.since:,}"
    return [Finding("note", f"{text}.{jump}")]
