"""What the ledger of conserved quantities adds to a training step.

    python -m benchmarks.ledger [--device cuda] [--model papers-cnn|resnet18] [--batch 50] [--repeats 15] [--threads 2]

Steps with and without a ledger run in turns, in one process, on two copies of one model with the same batches. A row per
optimizer: plain SGD, SGD with momentum and decay, AdamW. The spread of plain compared with plain shows the noise of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.timing import machine, race, ratio
from excite.probes import conservation
from excite.train.models.architectures import build

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "SGD, momentum, decay": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def make(model: str, seed: int = 0) -> nn.Module:
    if model == "resnet18":
        return build("resnet", seed=seed, stages=4, outputs=10)
    return build("papers-cnn", seed=seed)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y) if out.shape[1] > 1 else (out[:, 0] - y).square().mean()
        loss.backward()
        optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=["papers-cnn", "resnet18"], default="papers-cnn")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20, help="steps in one timed turn")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.batch, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10 if options.model == "resnet18" else 2, (options.batch,), generator=generator).to(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()
    print(f"## The ledger of conserved quantities\n\n{options.model}, batch {options.batch}; {where}\n")
    print(
        "| optimizer | step, ms | with ledger | ledger adds | plain compared with plain | channels | largest residual |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, optimizer_of in OPTIMIZERS.items():
        models = {key: make(options.model).to(device) for key in ("plain", "again", "ledger")}
        optimizers = {key: optimizer_of(model) for key, model in models.items()}
        with conservation(models["ledger"], optimizers["ledger"], x[:2]) as ledger:
            jobs = {key: partial(steps, models[key], optimizers[key], x, y, options.steps) for key in models}
            times = race(jobs, options.repeats)
            reading = ledger.read()
        middle, low, high = ratio(times["ledger"], times["plain"])
        same, under, over = ratio(times["again"], times["plain"])
        each = {key: statistics.median(found) / options.steps * 1e3 for key, found in times.items()}
        channels = sum(entry.group.channels for entry in reading.entries)
        print(
            f"| {name} | {each['plain']:.2f} | {each['ledger']:.2f} | {middle - 1:+.1%} ({low - 1:+.1%} to "
            f"{high - 1:+.1%}) | {same - 1:+.1%} ({under - 1:+.1%} to {over - 1:+.1%}) | {channels} | "
            f"{max(entry.relative for entry in reading.entries):.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
