"""Alignment of all layers of a ResNet-18 while it trains, beside the same training without it.

    python -m benchmarks.alignment [--device cuda] [--batch 512] [--every 100] [--repeats 8] [--width 64] [--half]

Random images of 32×32 in ten classes, SGD with momentum. A repeat is `every` steps plain, then as many with the probe, which
measures once in them; the ratio of the two is what it costs. Beside it the time of one measurement over that of `every`
steps, which spreads less. Accuracy: the probe's σ₁²/‖W‖²_F, warm-started, against a full decomposition at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from benchmarks.timing import machine, race, ratio
from excite.probes import Alignment
from excite.probes.base import Every, StepContext, Values
from excite.train.models.resnet import resnet


class Training:
    def __init__(self, device: str, batch: int, width: int, half: bool):
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = resnet(outputs=10, width=width, stages=4).to(self.device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.x = torch.rand(batch, 3, 32, 32, device=self.device) * 2 - 1
        self.y = torch.randint(10, (batch,), device=self.device)
        self.half, self.steps = half, 0

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, steps: int, probe: Alignment | None = None) -> None:
        for number in range(steps):
            self.step()
            if probe is not None and number == steps - 1:
                measured(probe, self)
        self.wait()


def measured(probe: Alignment, training: Training) -> Values:
    """All values of a measurement, waited for."""
    values = probe.measure(StepContext(training.model, training.steps))
    return values.result() if isinstance(values, Future) else values


def worst(training: Training, probe: Alignment) -> tuple[float, int]:
    """The largest relative error of σ₁²/‖W‖²_F over layers, and how many layers there are."""
    values = measured(probe, training)
    errors = []
    for name, module in training.model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            s = torch.linalg.svdvals(module.weight.detach().flatten(1).double())
            truth = float(s[0] ** 2 / s.square().sum())
            errors.append(abs(float(values[f"ratio/{name}"]) - truth) / truth)
    return max(errors), len(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--half", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training = Training(options.device, options.batch, options.width, options.half)
    probe = Alignment(Every(options.every))
    probe.attach(StepContext(training.model, 0, example=training.x[:2]))
    training.run(3)
    start = time.perf_counter()
    measured(probe, training)
    cold = time.perf_counter() - start
    training.run(3, probe)
    jobs = {"plain": lambda: training.run(options.every), "probe": lambda: training.run(options.every, probe)}
    times = race(jobs, options.repeats, warm=0)
    once = []
    for _ in range(options.repeats):
        training.run(1)
        start = time.perf_counter()
        measured(probe, training)
        once.append(time.perf_counter() - start)
    on = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    half = ", bfloat16" if options.half else ""
    middle, low, high = ratio(times["probe"], times["plain"])
    step = statistics.median(times["plain"]) / options.every
    error, layers = worst(training, probe)
    print(
        f"## Alignment of all layers\n\nResNet-18 of width {options.width}, batch {options.batch}{half}, {layers} layers; {on}\n"
    )
    print("| | |\n|---|---|")
    print(f"| a training step | {1e3 * step:.2f} ms |")
    print(
        f"| one measurement, all layers and junctions | {1e3 * statistics.median(once):.2f} ms (first {1e3 * cold:.0f} ms) |"
    )
    share = statistics.median(once) / (options.every * step)
    print(f"| added by measuring every {options.every} steps: measurement over steps | {share:.2%} |")
    print(f"| the same, whole runs in turns | {middle - 1:+.2%} (quartiles {low - 1:+.2%} to {high - 1:+.2%}) |")
    print(f"| largest error of σ₁²/‖W‖²_F, of a layer | {error:.1e} |")


if __name__ == "__main__":
    main()
