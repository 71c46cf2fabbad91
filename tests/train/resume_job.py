"""A training that a test kills and starts again: python resume_job.py RUN KIND [KILL_AT_STEP].

Tests run it in forked processes that have torch loaded already, with the arguments in the global ARGUMENTS.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn

from excite.data import load
from excite.excitation import PersistentExcitation, Stages
from excite.monitor.alerts import Above
from excite.monitor.watch import watch
from excite.runs import Run
from excite.train import fit, make_model, squared_error

torch.set_num_threads(1)


def noisy(x: int = 2) -> nn.Module:
    """Everything that draws or keeps state: dropout, batch normalization."""
    return nn.Sequential(
        nn.Linear(x, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)
    )


def job(path: str, how: str, kill_at: int | None = None) -> Any:
    data = load("moons", train=120, test=40, seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = noisy() if how == "noisy" else make_model("mlp", inputs=2, widths=(16, 8), seed=3)
    excitation = PersistentExcitation(model, Stages(0.05, 3)) if how == "excited" else None
    if how == "noisy":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.5)
    loss = excitation.loss if excitation is not None else squared_error(model)
    steps = 0

    def counted(x: Tensor, y: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(x, y)

    run = Run.create(path, {"kind": how}, resume=True)
    # One begins with the first step and stays, the other has to look back on 20 steps.
    rules = [Above("loss/step", limit=0.0), Above("loss/step", limit=0.0, measurements=20)]
    with run, watch(model, example=data.x_test[:20], run=run, optimizer=optimizer, alerts=rules) as watching:
        return fit(
            model, data, counted, optimizer, epochs=6, batch=16, seed=5, run=run, excitation=excitation, watch=watching,
            checkpoint_every="5 steps" if how != "excited" else "1 epoch",
        )  # fmt: skip


if __name__ == "__main__":
    arguments = globals().get("ARGUMENTS", sys.argv[1:])
    job(arguments[0], arguments[1], int(arguments[2]) if len(arguments) > 2 else None)
