"""What the trajectory probe adds to a training step: the papers' network at batch 50, ResNet-18 at batch 512.

    python -m benchmarks.trajectory [--device cpu|cuda] [--repeats 30] [--steps 20] [--only papers resnet] [--batch N]

Prints a table in Markdown: time of a step with the probe over that of a plain step, median and quartiles of paired repeats of
`steps` steps, and plain over plain for the spread. On a CPU only the papers' network runs unless --only says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import excite
from benchmarks.timing import machine, race, ratio
from excite.probes import Every, Probe, Trajectory
from excite.train.models.architectures import build

Made = Callable[[], Probe | None]
WAYS: dict[str, Made] = {
    "plain": lambda: None,
    "plain again": lambda: None,
    "every step written": lambda: Trajectory(Every(1)),
    "all samples, written every 10 steps": lambda: Trajectory(),
    "every step written, without bounds on the ratio": lambda: Trajectory(Every(1), bounds_every=None),
    "every step written, all layers": lambda: Trajectory(Every(1), layers="all", bounds_every=None),
}


class Job:
    """Some steps of training, with or without a probe; the same batches over and over."""

    def __init__(self, model: nn.Module, x: Any, y: Any, loss: Any, probe: Probe | None, steps: int, half: bool):
        self.model, self.x, self.y, self.loss, self.steps, self.half = model, x, y, loss, steps, half
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.watch = None if probe is None else excite.watch(model, example=x[0][:4], probes=[probe], strict=True)

    def __call__(self) -> None:
        for i in range(self.steps):
            x, y = self.x[i % len(self.x)], self.y[i % len(self.y)]
            self.optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16) if self.half else contextlib.nullcontext():
                loss = self.loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            if self.watch is not None:
                self.watch.step(loss)
        if self.x[0].is_cuda:
            torch.cuda.synchronize()


def squared(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (f[:, 0] - y).square().mean()


def jobs(name: str, device: str, batch: int, steps: int, half: bool) -> dict[str, Job]:
    torch.manual_seed(0)
    x = [torch.randn(batch, 3, 32, 32, device=device) for _ in range(4)]
    if name == "papers":
        model, loss = build("papers-cnn", seed=0), squared
        y = [torch.randint(2, (batch,), device=device).float() for _ in x]
    else:
        model, loss = build("resnet", outputs=10, stages=4, seed=0), F.cross_entropy
        y = [torch.randint(10, (batch,), device=device) for _ in x]
    model = model.to(device)
    found = {}
    for way, make in WAYS.items():
        if "all layers" not in way or name == "papers":
            found[way] = Job(copy.deepcopy(model), x, y, loss, make(), steps, half)
    return found


def report(times: dict[str, list[float]], steps: int) -> str:
    lines = ["| | ms per step | over plain | quartiles |", "|---|---|---|---|"]
    for way, seconds in times.items():
        middle, low, high = ratio(seconds, times["plain"])
        spread = "" if way == "plain" else f"{middle:.3f} | {low:.3f} to {high:.3f}"
        lines.append(f"| {way} | {1000 * sorted(seconds)[len(seconds) // 2] / steps:.3f} | {spread or ' | '} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--only", nargs="*", choices=["papers", "resnet"])
    options = parser.parse_args()
    chosen = options.only or (["papers"] if options.device == "cpu" else ["papers", "resnet"])
    where = machine() if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}\n")
    for name in chosen:
        batch = options.batch or {"papers": 50, "resnet": 512}[name]
        for half in (False, True) if options.device != "cpu" else (False,):
            title = {"papers": "The papers' network", "resnet": "ResNet-18"}[name]
            print(f"{title}, batch {batch}{', bfloat16' if half else ''}\n")
            made = jobs(name, options.device, batch, options.steps, half)
            print(report(race(dict(made), options.repeats), options.steps) + "\n")
            for job in made.values():
                if job.watch is not None:
                    job.watch.close()


if __name__ == "__main__":
    main()
