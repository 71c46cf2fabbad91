"""Cost of one adversarial training step with hidden layers, AWP or TRADES, as a multiple of PGD training's.

`python -m benchmarks.robust [--device cuda] [--batch 256] [--width 64] [--repeats 5]`

PreActResNet-18 (smaller by default on a CPU), five search steps, bfloat16 and captured as a CUDA graph on a GPU. Variants
take turns; medians of the repeats.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

from benchmarks.timing import race, ratio
from excite import AdversarialTraining
from excite.excitation import HiddenOptions
from excite.train.cuda_graph import CapturedStep
from excite.train.models.architectures import ARCHITECTURES

VARIANTS = {
    "PGD training": {},
    "every layer": {"hidden_radius": 0.003},
    "every layer, last step only": {"hidden_radius": 0.003, "hidden": HiddenOptions(once=True)},
    "every layer, 2-norm": {"hidden_radius": 0.003, "hidden": HiddenOptions("2")},
    "AWP": {"awp": 0.005},
    "every layer and AWP": {"hidden_radius": 0.003, "awp": 0.005},
    "TRADES": {"trades": 6.0},
    "best iterate": {"keep_best": True},
}


def _loss(method: AdversarialTraining, device: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return method.loss(x, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=None, help="64 is PreActResNet-18; 8 by default on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="training steps per repeat")
    options = parser.parse_args()
    device, cuda = options.device, options.device == "cuda"
    width = options.width or (64 if cuda else 8)
    x = torch.rand(options.batch, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (options.batch,), device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    steps, memory = {}, {}
    for name, settings in VARIANTS.items():
        torch.manual_seed(0)
        model = ARCHITECTURES["preact-resnet"](3, 10, width=width).to(device).to(memory_format=torch.channels_last)
        method = AdversarialTraining(
            model, 8 / 255, steps=5, loss="cross-entropy", classes=10, bounds=(0, 1), **settings
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
        step = CapturedStep(partial(_loss, method, device), optimizer, method.setting)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(5 if cuda else 1):
            step(x, y)
        if cuda:
            torch.cuda.synchronize()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        steps[name] = step

    def several(name: str) -> None:
        for _ in range(options.steps):
            steps[name](x, y)
        if cuda:
            torch.cuda.synchronize()

    times = race({name: partial(several, name) for name in VARIANTS}, options.repeats, warm=1)
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"preact-resnet, width {width}, batch {options.batch}, five search steps; {where}")
    print("| | ms per step | times PGD training | peak memory, GiB | captured |")
    print("| --- | --: | --: | --: | --- |")
    for name, taken in times.items():
        median, (times_pgd, _, _) = statistics.median(taken) / options.steps, ratio(taken, times["PGD training"])
        used = f"{memory[name]:.2f}" if cuda else "–"
        captured = "yes" if steps[name].why_not is None else steps[name].why_not
        print(f"| {name} | {1000 * median:.1f} | {times_pgd:.2f} | {used} | {captured} |")


if __name__ == "__main__":
    main()
