"""What live margins of training and test data add to a training.

    python -m benchmarks.live_margins [--device cuda --model resnet18 --batch 512] [--seconds 120] [--threads 2]

A training on random images of the size of CIFAR-10, watched with the default probes and `train=`, `test=`. Printed are the seconds
of the measurements at the start and at the end, which are apart, those of one measurement in between, and the fraction of the training
time that these took: all of it is counted by the schedule, which measures once the time so far pays for it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from torch import nn

import excite
from benchmarks.ledger import make
from benchmarks.timing import machine
from excite.probes import MarginGap


def train(model: nn.Module, device: torch.device, batch: int, seconds: float, folder: str) -> dict[str, Any]:
    """Trains for some seconds and returns what was measured."""
    generator = torch.Generator().manual_seed(0)
    data = {part: torch.rand(2000, 3, 32, 32, generator=generator) for part in ("train", "test")}
    outputs = model(data["train"][:2].to(device)).shape[1]
    labels = {part: (x[:, 0, :8].mean((1, 2)) > 0.5).long() for part, x in data.items()}
    x, y = data["train"].to(device), labels["train"].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    began = time.monotonic()
    pairs = {part: (data[part], labels[part]) for part in data}
    with excite.watch(model, run=folder, optimizer=optimizer, bounds=(0, 1), **pairs) as watch:
        start = time.monotonic() - began
        probe = next(one for one in watch.probes if isinstance(one, MarginGap))
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            rows = torch.randint(len(x), (batch,), device=device)
            optimizer.zero_grad()
            f = model(x[rows])
            loss = nn.functional.cross_entropy(f, y[rows]) if outputs > 1 else (f[:, 0] - y[rows]).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
        if device.type == "cuda":
            torch.cuda.synchronize()
        trained, steps, share = time.monotonic() - began, watch.steps, watch.share
        spent, cost = probe.schedule.spent, probe.schedule.cost
        began = time.monotonic()
    end = time.monotonic() - began
    run = excite.load_run(folder)
    found = run.series("margin_gap/points/train")
    return {
        "start": start, "end": end, "trained": trained, "steps": steps, "spent": spent, "cost": cost, "share": share,
        "measured": sum(0 < step < steps for step in found[0]), "points": int(found[1][-1]), "live": int(found[1][0]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="papers-cnn")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = make(options.model).to(device)
    with tempfile.TemporaryDirectory() as folder:
        found = train(model, device, options.batch, options.seconds, f"{folder}/run")
    where = torch.cuda.get_device_name() if device.type == "cuda" else machine()
    print(f"{options.model}, batch {options.batch}; {where}\n")
    print("| | |\n| --- | --: |")
    rows = {
        "training, seconds": f"{found['trained']:.0f}",
        "steps": f"{found['steps']}",
        "seconds before training (all probes)": f"{found['start']:.1f}",
        f"one measurement of {found['live']} + {found['live']} points, seconds": f"{found['cost']:.2f}",
        "measurements during training": f"{found['measured']}",
        "their fraction of the training time": f"{found['spent'] / found['trained']:.1%}",
        "fraction of all probes together (watch.share)": f"{found['share']:.1%}",
        f"at the end, {found['points']} + {found['points']} points, seconds": f"{found['end']:.1f}",
    }
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
