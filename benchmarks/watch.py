"""What watching adds to a training step.

    python -m benchmarks.watch [--device cuda --model resnet18 --batch 512] [--steps 100] [--repeats 9] [--threads 2]

Plain steps and watched ones run in turns, in one process, on copies of one model with the same batch: the default probes
on the default schedule, and trajectory and ledger alone at every step. The spread of plain against plain tells what a
ratio means. Below: what one measurement of each default probe takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

import excite
from benchmarks.ledger import make
from benchmarks.timing import machine, race, ratio
from excite._core.background import drain
from excite.probes import Conservation, Every, Loss, Trajectory, default_probes
from excite.probes.base import StepContext

_PHASE = 25  # steps ahead: measurements at every 50th step fall into the middle of a turn, and what follows one is timed with it


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, watch: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y) if out.shape[1] > 1 else (out[:, 0] - y).square().mean()
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch.step(loss)
    if x.is_cuda:
        torch.cuda.synchronize()
    drain()  # what another thread still does belongs to these steps, not to those of the next turn


def _cases() -> list[tuple[str, float, Callable[[], Any] | None, str]]:
    """Name, momentum, probes, and what it is compared with. The ledger's work depends on the optimizer."""

    def all_steps() -> list[Any]:
        return [Loss(), Trajectory(Every(1)), Conservation(Every(1))]

    return [
        ("plain", 0.9, None, "plain"),
        ("plain again", 0.9, None, "plain"),
        ("default probes", 0.9, default_probes, "plain"),
        ("trajectory and ledger at every step", 0.9, all_steps, "plain"),
        ("plain, no momentum", 0.0, None, "plain, no momentum"),
        ("trajectory and ledger at every step, no momentum", 0.0, all_steps, "plain, no momentum"),
    ]


def each(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any, repeats: int) -> None:
    """Seconds of one measurement, probe by probe."""
    print("\n| probe | one measurement, ms | of a step, at every 50th |\n|---|---|---|")
    took = []
    for _ in range(5):
        start = time.perf_counter()
        steps(model, optimizer, x, y, None, 10)
        took.append((time.perf_counter() - start) / 10)
    for probe in default_probes():
        ctx = StepContext(model, 0, None, x[:256], optimizer)
        probe.attach(ctx)
        times = []
        for i in range(repeats + 1):
            steps(model, optimizer, x, y, None, 1)
            ctx = StepContext(model, i + 1, torch.zeros(()), x[:256], optimizer)
            start = time.perf_counter()
            probe.measure(ctx)
            if x.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        probe.detach()
        middle = statistics.median(times[1:])
        print(f"| {probe.name} | {1e3 * middle:.2f} | {middle / 50 / statistics.median(took):.2%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=["papers-cnn", "resnet18"], default="papers-cnn")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100, help="steps in one timed turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.batch, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10 if options.model == "resnet18" else 2, (options.batch,), generator=generator).to(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()
    print(f"## Watching\n\n{options.model}, batch {options.batch}; {where}\n", flush=True)
    jobs: dict[str, Callable[[], object]] = {}
    against: dict[str, str] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        watches: dict[str, Any] = {}
        for name, momentum, chosen, base in _cases():
            model = make(options.model).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
            if chosen is not None:
                watches[name] = stack.enter_context(
                    excite.watch(model, x[:256], f"{folder}/{len(jobs)}", optimizer, chosen(), strict=True)
                )
            job = partial(steps, model, optimizer, x, y, watches.get(name))
            job(_PHASE)
            jobs[name], against[name] = partial(job, options.steps), base
        times = race(jobs, options.repeats, warm=1)
        for watch in watches.values():
            watch.flush()
        print("| | step, ms | adds | measurements of each probe in 1000 steps |\n|---|---|---|---|")
        for name, found in times.items():
            middle, low, high = ratio(found, times[against[name]])
            seen = ""
            if name in watches:
                timed = options.repeats * options.steps
                frame = watches[name].run.frame()
                frame = frame[~frame.name.str.startswith("alert/") & (frame.step > watches[name].steps - timed)]
                counts = frame.step.groupby(frame.name.str.split("/").str[0]).nunique()
                counts = counts.reindex([probe.name for probe in watches[name].probes], fill_value=0)
                seen = f"at least {int(counts.min() * 1000 / timed)}"
            ms = statistics.median(found) / options.steps * 1e3
            print(f"| {name} | {ms:.2f} | {middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}) | {seen} |", flush=True)
    model = make(options.model).to(device)
    each(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), x, y, options.repeats)


if __name__ == "__main__":
    main()
