"""Forty networks of the study `frequency` at once, beside one at a time as an nn.Module with torch.optim.SGD.

    python -m benchmarks.ensemble [--steps 1000] [--repeats 9] [--networks 40] [--threads 1] [--device cpu]

The ensemble measures the trajectory and the test loss along the way; the others only train. The third contestant is one
nn.Module with the weights of all networks on a new axis, trained by autograd, as `excite.train` does for seeds of a study.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from torch import Tensor, nn

from benchmarks.timing import machine, race, ratio
from excite.studies.trajectory.frequency import FREQUENCIES, network, points
from excite.train import ensemble
from excite.train.vectorized.stacked_modules import StackedLayers, stack_batches, stack_models

EPOCH = 100


def forty(count: int, device: str) -> tuple[list[nn.Sequential], list[Tensor]]:
    """Networks, and x, y, x_test, y_test with a first axis for them: the four frequencies in turn."""
    drawn = [points(FREQUENCIES[i % 4], seed=i // 4) for i in range(count)]
    data = [torch.stack(parts).to(device) for parts in zip(*drawn)]
    return [network(seed=i).to(device) for i in range(count)], data


def alone(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(steps):
        at = step % len(x)
        optimizer.zero_grad()
        loss = (model(x[at : at + 1]).squeeze(1) - y[at : at + 1]).square().mean() / 2
        loss.backward()
        optimizer.step()


def stacked(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """x (S, N, d), y (S, N)."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(steps):
        at = step % x.shape[1]
        optimizer.zero_grad()
        with StackedLayers():
            f = model(stack_batches(list(x[:, at : at + 1])))
        ((f.squeeze(1) - y[:, at]).square() / 2).sum().backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of each network, in each repeat")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--networks", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="of torch; networks this small gain nothing from more")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count, steps = options.networks, options.steps // EPOCH * EPOCH
    models, (x, y, x_test, y_test) = forty(count, options.device)
    wait = torch.cuda.synchronize if options.device != "cpu" else lambda: None

    def together() -> None:
        ensemble(copy.deepcopy(models), x, y, epochs=steps // EPOCH, lr=1e-3, test=(x_test, y_test))
        wait()

    def one() -> None:
        alone(copy.deepcopy(models[0]), x[0], y[0], steps)
        wait()

    def by_autograd() -> None:
        stacked(stack_models(copy.deepcopy(models)), x, y, steps)
        wait()

    times = race({"ensemble": together, "alone": one, "autograd": by_autograd}, options.repeats, warm=1)
    each = {name: 1e6 * statistics.median(found) / steps for name, found in times.items()}
    rows = {
        "one at a time, `nn.Module` and `torch.optim.SGD`": ("alone", 1),
        f"{count} stacked in one `nn.Module`, autograd": ("autograd", count),
        f"{count} in `excite.train.ensemble`, with trajectories": ("ensemble", count),
    }
    print("## Many small networks at once\n")
    print(
        f"Networks 10-10-32-32-32-1 of the study `frequency`, batch size 1, {steps} steps, median of {options.repeats}"
    )
    print(f"repeats, quartiles of paired ratios; {options.device}: {machine()}.\n")
    print("| | µs per step | µs per step and network | throughput |")
    print("| --- | ---: | ---: | ---: |")
    for words, (name, networks) in rows.items():
        middle, low, high = ratio(times["alone"], times[name])
        gain = f"× {networks * middle:.0f} ({networks * low:.0f}–{networks * high:.0f})" if networks > 1 else "1"
        print(f"| {words} | {each[name]:.0f} | {each[name] / networks:.1f} | {gain} |")
    whole = each["ensemble"] * 300_000 / 60e6
    print(
        f"\nAt this speed 300,000 steps of {count} networks, the study `frequency` at scale `paper`, take {whole:.1f} minutes."
    )


if __name__ == "__main__":
    main()
