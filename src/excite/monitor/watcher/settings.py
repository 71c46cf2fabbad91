"""The settings of a watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from excite._core.calls import Batch, Pick
from excite.monitor.alerts import Rule
from excite.monitor.checkpoint import WeightSaver
from excite.monitor.writer import Sink
from excite.probes import Probe
from excite.runs import Run


@dataclass(frozen=True)
class WatchSettings:
    """Settings of a `Watch`: probes and destinations; `excite.watch` checks its arguments and makes one.

    Attributes:
        example: Fixed batch on which layers are measured, or None.
        run: Run to write to, or None.
        optimizer: Optimizer that trains the model, or None.
        probes: Probes to attach.
        strict: Whether exceptions of probes and of the writer are raised.
        owns_run: Whether closing the watch closes the run.
        sinks: Other places to write to.
        alerts: Rules to evaluate.
        optional: Whether a probe that cannot be attached to this model is left out; else its exception is raised.
        output: Which part of the model's return value is the output.
        saver: Stores the weights, or None.
    """

    example: Batch | None
    run: Run | None
    optimizer: torch.optim.Optimizer | None
    probes: Sequence[Probe]
    strict: bool
    owns_run: bool
    sinks: Sequence[Sink] = ()
    alerts: Sequence[Rule] = ()
    optional: bool = False
    output: Pick = None
    saver: WeightSaver | None = None
