"""Excitation on a GPU: a captured step beside a plain one, many seeds at once, margins, a large network.

    python -m benchmarks.gpu [--data FOLDER] [--epochs 40] [--seeds 10] [--points 12000] [--only PART ...]

Parts: agreement, step, one, many, margins, resnet, memory. The authors' network and settings on CIFAR-10 planes against
horses; needs the data. Prints the first section of docs/benchmarks-gpu.md. Runs on a CPU too, for a try with small numbers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from excite.data import Dataset, load
from excite.excitation import PersistentExcitation
from excite.margin import SearchOptions, margins
from excite.train.config import TrainConfig, parse_config
from excite.train.cuda_graph import CapturedStep
from excite.train.from_config import train, train_together
from excite.train.models.architectures import build
from excite.train.step import Step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(epochs: int, seed: int, excited: bool = True) -> TrainConfig:
    return parse_config({
        "data": {"name": "cifar10", "classes": ["airplane", "horse"]},
        "model": {"name": "papers-cnn"},
        "excitation": {"radius": 0.02, "stages": 4} if excited else None,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.9},
        "epochs": epochs, "batch": 50, "seed": seed, "device": DEVICE, "watch": False, "checkpoint_every": "10 epochs",
    })  # fmt: skip


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)


def seconds_a_step(step: Callable[[], object], repeats: int) -> float:
    """Median over five rounds."""
    for _ in range(8):
        step()
    found = []
    for _ in range(5):
        start = now()
        for _ in range(repeats):
            step()
        found.append((now() - start) / repeats)
    return statistics.median(found)


def agreement(data: Dataset, **_: Any) -> None:
    """Losses of the first 50 steps, plain and captured, from the same weights on the same batches."""
    found: dict[str, list[float]] = {}
    x, y = data.x_train.to(DEVICE), data.y_train.to(DEVICE)
    # A sign amplifies what atomic additions leave to chance: two plain runs differ as much as a plain and a captured one.
    torch.backends.cudnn.deterministic = True
    for name, kind in (("plain", Step), ("plain again", Step), ("captured", CapturedStep)):
        model = build("papers-cnn").to(DEVICE)
        pe = PersistentExcitation(model, 0.02)
        step = kind(pe.loss, optimizer_of(model), pe.setting)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        found[name] = [float(step(x[at], y[at])) for at in order.split(50)[:50]]
        if kind is CapturedStep and step.why_not is not None:
            print(f"not captured: {step.why_not}")
    for name in ("plain again", "captured"):
        apart = max(abs(a - b) / abs(a) for a, b in zip(found["plain"], found[name]))
        print(f"- first {len(found[name])} losses, largest relative difference of {name} to plain: {apart:.1e}")
    torch.backends.cudnn.deterministic = False


def one_step(data: Dataset | None, **_: Any) -> None:
    """One step of the authors' network, on random images."""
    x, y = torch.rand(50, 3, 32, 32, device=DEVICE) * 2 - 1, torch.randint(2, (50,), device=DEVICE)
    lines = ["| step, batch of 50 | plain, ms | captured, ms |", "|---|---|---|"]
    for name, radius, bounds in (
        ("without excitation", 0.0, None),
        ("4 search steps", 0.02, None),
        ("4 search steps, bounds", 0.02, (-1, 1)),
    ):
        times = []
        for kind in (Step, CapturedStep):
            model = build("papers-cnn").to(DEVICE)
            pe = PersistentExcitation(model, radius, bounds=bounds)
            step = kind(pe.loss, optimizer_of(model), pe.setting)
            times.append(seconds_a_step(lambda step=step: step(x, y), 50))  # type: ignore[misc]
        lines.append(f"| {name} | {1000 * times[0]:.2f} | {1000 * times[1]:.2f} |")
    print("\n".join(lines))


def one(data: Dataset, epochs: int, **_: Any) -> None:
    """One seed, one variant, the authors' training."""
    with tempfile.TemporaryDirectory() as folder:
        start = now()
        run = train(config(epochs, 0), Path(folder) / "run")
        print(f"- {epochs} epochs of {len(data.x_train)} images: {now() - start:.1f} s, data and checkpoints included")
        print(f"- test accuracy {run.series('accuracy/test')[1][-1]:.3f}")
        run.close()


def many(data: Dataset, epochs: int, seeds: int, **_: Any) -> None:
    """Several seeds in one vectorized step."""
    with tempfile.TemporaryDirectory() as folder:
        start = now()
        runs = train_together([config(epochs, s) for s in range(seeds)], [Path(folder) / str(s) for s in range(seeds)])
        print(f"- {seeds} seeds together, {epochs} epochs: {now() - start:.1f} s")
        print("- test accuracies", " ".join(f"{run.series('accuracy/test')[1][-1]:.3f}" for run in runs))
        for run in runs:
            run.close()


def margin_speed(data: Dataset, points: int, **_: Any) -> None:
    """Margins of training and test images, evidence excluded."""
    x = torch.cat([data.x_test, data.x_train])[:points].to(DEVICE)
    y = torch.cat([data.y_test, data.y_train])[:points].to(DEVICE)
    for name, excited in (("plain", False), ("excited", True)):
        with tempfile.TemporaryDirectory() as folder:
            train(config(4, 0, excited), Path(folder) / "run").close()
            from excite.train.evaluate import load_model

            model = load_model(Path(folder) / "run").model.to(DEVICE)
        margins(model, x[:100], y[:100], bounds=(-1, 1), options=SearchOptions(evidence=False, certify=False))
        start = now()
        found = margins(model, x, y, bounds=(-1, 1), options=SearchOptions(evidence=False, certify=False))
        print(f"- margins of {len(x)} images, {name} training: {now() - start:.1f} s; median {found.median:.4f}")


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 × 32, one output."""
    return build("resnet", stages=4)


def resnet_speed(data: Dataset | None, batch: int, **_: Any) -> None:
    """ResNet-18, bfloat16, one search step compared with a plain step; captured or not."""
    x, y = torch.rand(batch, 3, 32, 32, device=DEVICE) * 2 - 1, torch.randint(2, (batch,), device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last)
    lines = ["| ResNet-18, bfloat16 | plain step, ms | one search step, ms | ratio |", "|---|---|---|---|"]
    for name, kind in (("kernel by kernel", Step), ("captured", CapturedStep)):
        times = []
        for radius in (0.0, 0.001):
            model = resnet18().to(DEVICE).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            pe = PersistentExcitation(model, radius, steps=1)

            def loss(x: Tensor, y: Tensor, pe: PersistentExcitation = pe) -> Tensor:
                with torch.autocast(DEVICE, torch.bfloat16):
                    return pe.loss(x, y)

            step = kind(loss, optimizer_of(model), pe.setting)
            times.append(seconds_a_step(lambda step=step: step(x, y), 5))  # type: ignore[misc]
            if step.why_not and kind is CapturedStep:
                print(step.why_not)
        lines.append(f"| {name} | {1000 * times[0]:.1f} | {1000 * times[1]:.1f} | {times[1] / times[0]:.2f} |")
    print("\n".join(lines))


def peak(network: str, kind: type[Step], queue: Any) -> None:
    """Peak memory of twenty excited steps in a process of its own, workspaces of the libraries included."""
    torch.manual_seed(0)
    batch = 50 if network == "papers-cnn" else 512
    x, y = torch.randn(batch, 3, 32, 32, device=DEVICE), torch.randint(2, (batch,), device=DEVICE)
    model = (build("papers-cnn") if network == "papers-cnn" else resnet18()).to(DEVICE)
    pe = PersistentExcitation(model, 0.001)
    step = kind(pe.loss, optimizer_of(model), pe.setting)
    for _ in range(20):
        step(x, y)
    torch.cuda.synchronize()
    queue.put(torch.cuda.max_memory_allocated() / 2**20)


def memory(data: Dataset | None, **_: Any) -> None:
    """Peak memory of a step with excitation, 4 search steps, float32."""
    if DEVICE != "cuda":
        return
    context = torch.multiprocessing.get_context("spawn")
    print("| network | plain, MiB | captured, MiB | ratio |\n|---|---|---|---|")
    for network in ("papers-cnn", "ResNet-18"):
        found = []
        for kind in (Step, CapturedStep):
            queue = context.Queue()
            process = context.Process(target=peak, args=(network, kind, queue))
            process.start()
            found.append(queue.get(timeout=120))
            process.join()
        print(f"| {network} | {found[0]:.0f} | {found[1]:.0f} | {found[1] / found[0]:.2f} |")


PARTS: dict[str, Callable[..., None]] = {
    "agreement": agreement, "step": one_step, "one": one, "many": many, "margins": margin_speed, "resnet": resnet_speed, "memory": memory
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder that holds CIFAR-10; else EXCITE_DATA")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--points", type=int, default=12_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(
        f"## Training with excitation\n\n{name}, torch {torch.__version__.split('+')[0]}. Command: `python -m benchmarks.gpu`\n"
    )
    needs_data = bool(set(options.only) - {"memory", "resnet", "step"})
    data = load("cifar10", classes=("airplane", "horse"), root=options.data) if needs_data else None
    for part in options.only:
        print(f"\n### {(PARTS[part].__doc__ or part).strip().rstrip('.')}\n", flush=True)
        PARTS[part](data, epochs=options.epochs, seeds=options.seeds, points=options.points, batch=options.batch)


if __name__ == "__main__":
    main()
