"""What a step with persistent excitation costs on the papers' network (batch 50, 4 steps, float32).

    python -m benchmarks.excitation [--repeats 15]

Prints tables in Markdown: time against the sum of its own passes, against a plain step, against the literal search
image by image, and peak memory against batch size and number of search steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from torch import Tensor, nn

from benchmarks.timing import machine, race, ratio
from excite import PersistentExcitation
from excite.train.models.architectures import build

BATCH, STEPS, RADIUS = 50, 4, 0.02


def images(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, 3, 32, 32, generator=generator) * 2 - 1, torch.arange(batch) % 2


def literal_search(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Algorithm 1 image by image: perturbations added by module hooks, one search up and one down."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    outputs = []
    for image in x.split(1):
        for sign in (1, -1):
            d: list[Tensor | None] = [None] * len(layers)

            def hook(module: nn.Module, args: tuple[Tensor], d: list[Tensor | None] = d) -> tuple[Tensor]:
                k = layers.index(module)
                if d[k] is None:
                    d[k] = torch.zeros_like(args[0], requires_grad=True)
                return (args[0] + d[k],)

            handles = [layer.register_forward_pre_hook(hook) for layer in layers]
            for _ in range(STEPS):
                gradients = torch.autograd.grad(model(image).sum(), d if d[0] is not None else _filled(model, image, d))
                for k, gradient in enumerate(gradients):
                    d[k] = (d[k] + sign * RADIUS / STEPS * gradient.sign()).detach().requires_grad_()
            outputs.append(model(image))
            for handle in handles:
                handle.remove()
    return outputs


def _filled(model: nn.Module, image: Tensor, d: list[Tensor | None]) -> list[Tensor | None]:
    model(image)  # the hooks put zeros of the right shapes into d
    return d


def literal_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    outputs = torch.cat(literal_search(model, x)).squeeze(1).reshape(-1, 2)
    (0.5 * (outputs - y[:, None]).square().sum(1)).mean().backward()


def speed(repeats: int) -> str:
    torch.manual_seed(0)
    model = build("papers-cnn")
    frozen = copy.deepcopy(model).requires_grad_(False)
    x, y = images(BATCH)
    twice, targets = torch.cat([x, x]), torch.cat([y, y])
    leaf, leaves = x.clone().requires_grad_(), twice.clone().requires_grad_()
    few = 2  # images for the literal search, which is slow; counted per image
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9, dampening=0.9)
    excitation = PersistentExcitation(model, RADIUS, steps=STEPS)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    times = race(
        {
            "excited step": lambda: update(excitation.loss(x, y)),
            "clean pass": lambda: torch.autograd.grad(frozen(leaf).sum(), leaf),
            "search pass": lambda: torch.autograd.grad(frozen(leaves).sum(), leaves),
            "loss pass": lambda: update((model(twice).squeeze(1) - targets).square().mean()),
            "plain step": lambda: update((model(x).squeeze(1) - y).square().mean()),
            "literal": lambda: literal_step(model, x[:few], y[:few]),
        },
        repeats,
    )
    own = [c + (STEPS - 1) * s + p for c, s, p in zip(times["clean pass"], times["search pass"], times["loss pass"])]
    per_image = [t / few for t in times["literal"]]
    excited = [t / BATCH for t in times["excited step"]]
    rows = [
        ("excited step / sum of its own passes", ratio(times["excited step"], own), "at most 1.2"),
        ("excited step / plain step", ratio(times["excited step"], times["plain step"]), "about 9 if straightforward"),
        ("literal search, image by image / excited step, per image", ratio(per_image, excited), "at least 7"),
    ]
    lines = [
        f"{name}: {statistics.median(t) * 1e3:.1f} ms"
        for name, t in {**times, "its own passes": own}.items()
        if name != "literal"
    ]
    table = ["| ratio | median | quartiles | aim |", "| --- | --- | --- | --- |"]
    table += [f"| {name} | {m:.2f} | {low:.2f} to {high:.2f} | {aim} |" for name, (m, low, high), aim in rows]
    return "\n".join(table) + "\n\nMedians: " + ", ".join(lines) + f" ({repeats} interleaved repeats)."


def peak_memory(batch: int, steps: int) -> int:
    """Largest number of bytes that torch holds at once during one step, beyond what it held before, by its profiler."""
    model, (x, y) = build("papers-cnn"), images(batch)
    excitation = PersistentExcitation(model, RADIUS, steps=steps)
    excitation.loss(x, y).backward()  # gradients exist from here on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        excitation.loss(x, y).backward()
    held = peak = 0
    for event in sorted(
        (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def memory() -> str:
    batches, counts = (25, 50, 100, 200), (1, 2, 4, 8, 16)
    by_batch = {b: peak_memory(b, STEPS) for b in batches}
    by_steps = {s: peak_memory(BATCH, s) for s in counts}
    lines = [f"| batch (4 steps) | {' | '.join(map(str, batches))} |", "| --- |" + " --- |" * len(batches)]
    lines.append("| peak, MiB | " + " | ".join(f"{by_batch[b] / 2**20:.1f}" for b in batches) + " |")
    lines.append("| peak / batch, KiB | " + " | ".join(f"{by_batch[b] / b / 2**10:.0f}" for b in batches) + " |")
    lines += ["", f"| steps (batch 50) | {' | '.join(map(str, counts))} |", "| --- |" + " --- |" * len(counts)]
    lines.append("| peak, MiB | " + " | ".join(f"{by_steps[s] / 2**20:.1f}" for s in counts) + " |")
    return "\n".join(lines)


def report(repeats: int) -> str:
    return "\n\n".join(["## A step with persistent excitation", f"Papers' network, batch {BATCH}, {STEPS} search steps, float32; {machine()}.", speed(repeats), "### Memory of a step", memory()])  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    print(report(parser.parse_args().repeats))
