"""What excitation, watch and the ledger cost against parameters, depth and batch; a cost model, and what it predicts.

    python -m benchmarks.scaling [--device cpu|cuda] [--quick] [--threads 1] [--out FILE.json]
    python -m benchmarks.scaling --fit FILE.json

Residual networks of growing width and transformers of growing depth and width, random data, float32, SGD with momentum. One
step at a time, synchronised: plain, excited (all layers, 4 search steps), with the ledger at every step (in turns); and
watched with the default probes. Prints tables in Markdown; `--out` keeps the measurements, `--fit` prints the tables from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import excite
from benchmarks.scaling_model import SEARCH, Measurement, grams, page
from benchmarks.timing import machine, race, ratio
from excite.probes import conservation
from excite.train.models.resnet import resnet

CLASSES = 10
RADIUS = 1e-3  # relative: small, so that no signal collapses; the time does not depend on it
CYCLE = 5  # steps between two measurements of the watch that is timed
FULL = {"widths": (16, 32, 64, 128), "batches": (128, 512), "depths": (2, 4, 8, 16), "dims": (256, 512), "tokens": 64}
QUICK = {"widths": (4, 8, 16), "batches": (4, 16), "depths": (2, 6), "dims": (64, 128), "tokens": 16}


class Transformer(nn.Module):
    """`depth` blocks of width `dim`, on sequences (B, T, dim) of vectors; the head reads their mean: one output."""

    def __init__(self, depth: int, dim: int) -> None:
        super().__init__()
        block = partial(nn.TransformerEncoderLayer, dim, max(1, dim // 64), 4 * dim, dropout=0.0, activation="gelu")
        self.blocks = nn.ModuleList(block(batch_first=True, norm_first=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Subject:
    """One network with one batch, and its steps."""

    def __init__(self, family: str, size: tuple[int, int], batch: int, tokens: int, device: torch.device):
        self.family, self.batch, self.device = family, batch, device
        many = family == "resnet"
        self.make: Callable[[], nn.Module] = (
            partial(resnet, outputs=CLASSES, width=size[0], stages=4) if many else partial(Transformer, *size)
        )
        self.name = f"residual, width {size[0]}" if many else f"transformer, depth {size[0]}, width {size[1]}"
        self.classes = CLASSES if many else None
        generator = torch.Generator().manual_seed(0)
        shape = (batch, 3, 32, 32) if many else (batch, tokens, size[1])
        self.x = torch.randn(shape, generator=generator).to(device)
        self.y = torch.randint(CLASSES if many else 2, (batch,), generator=generator).to(device)
        self.example = self.x[:32]

    def trainer(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = self.make().to(self.device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def loss(self, model: nn.Module) -> Tensor:
        out = model(self.x)
        if self.classes:
            return nn.functional.cross_entropy(out, self.y)
        return (out[:, 0] - self.y).square().mean()

    def step(self, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    def timed(self, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
        self.step(loss, optimizer)
        self.wait()

    def excited(self, model: nn.Module) -> Callable[[], Tensor]:
        pe = excite.PersistentExcitation(model, excite.Relative(RADIUS), steps=SEARCH, classes=self.classes)
        return partial(pe.loss, self.x, self.y)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> float | None:
        """Bytes at the peak of a step, after one to warm up; None on a CPU."""
        if self.device.type != "cuda":
            return None
        self.timed(loss, optimizer)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.timed(loss, optimizer)
        return float(torch.cuda.max_memory_allocated(self.device))

    def held(self) -> float | None:
        self.wait()
        return float(torch.cuda.memory_allocated(self.device)) if self.device.type == "cuda" else None


def watched(subject: Subject, cycles: int) -> tuple[float, float, float | None]:
    """Seconds of a step between two measurements, seconds that one measurement adds, bytes that the watch keeps.

    What a measurement leaves to a thread may slow the next steps, so the whole cycle counts."""
    model, optimizer = subject.trainer()
    loss = partial(subject.loss, model)
    subject.timed(loss, optimizer)
    optimizer.zero_grad()
    before = subject.held()
    times: list[float] = []
    with excite.watch(model, subject.example, None, optimizer, every=CYCLE, alerts=[], strict=True) as watch:
        for _ in range(CYCLE * (cycles + 2) - 1):
            start = time.perf_counter()
            watch.step(subject.step(loss, optimizer))
            subject.wait()
            times.append(time.perf_counter() - start)
        optimizer.zero_grad()
        after = subject.held()
    times = times[CYCLE - 1 :]  # cycles begin with the step that is measured; the first of them warms up
    rounds = [times[i * CYCLE : (i + 1) * CYCLE] for i in range(1, cycles + 1)]
    between = statistics.median(t for one in rounds for t in one[1:])
    adds = statistics.median(sum(one) - CYCLE * between for one in rounds)
    return between, max(adds, 0.0), None if before is None or after is None else after - before


def measure(subject: Subject, repeats: int) -> Measurement:
    model, optimizer = subject.trainer()
    with FlopCounterMode(display=False) as flops:
        subject.loss(model).backward()
    peaks = [subject.peak(loss, optimizer) for loss in (partial(subject.loss, model), subject.excited(model))]
    wiring = excite.trace(model, subject.example[:2])
    shapes = [tuple(p.flatten(1).shape) for p in model.parameters() if p.dim() > 1]
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    jobs: dict[str, Callable[[], object]] = {"plain": partial(subject.timed, partial(subject.loss, model), optimizer)}
    other, its = subject.trainer()
    excited = partial(subject.timed, subject.excited(other), its)
    kept, its = subject.trainer()
    with conservation(kept, its, wiring=wiring) as ledger:
        jobs["ledger"] = partial(subject.timed, partial(subject.loss, kept), its)
        cheap = race(jobs, 3 * repeats)
        dear = race({"plain": jobs["plain"], "excited": excited}, repeats)
        groups = [law.group for law in ledger.laws]
    under_law = {site.parameter for group in groups for site in (*group.producers, *group.consumers)}
    plain = statistics.median([*cheap["plain"], *dear["plain"]])
    ledger_adds = statistics.median(a - b for a, b in zip(cheap["ledger"], cheap["plain"]))
    between, adds, bytes_kept = watched(subject, cycles=4)
    return Measurement(
        family=subject.family, name=subject.name, batch=subject.batch, parameters=sum(parameters.values()),
        layers=len(wiring.layers), turns=1 if subject.classes else 0, flops=float(flops.get_total_flops()),
        grams=grams(shapes), example=len(subject.example), under_law=sum(parameters[path] for path in under_law),
        plain=plain, excited=plain * ratio(dear["excited"], dear["plain"])[0], ledger=plain + ledger_adds, between=between, measurement=adds,
        peak_plain=peaks[0], peak_excited=peaks[1], watch_bytes=bytes_kept,
    )  # fmt: skip


def subjects(quick: bool, device: torch.device) -> list[Subject]:
    sizes = QUICK if quick else FULL
    found = [("resnet", (width, 0), batch) for batch in sizes["batches"] for width in sizes["widths"]]  # type: ignore[union-attr]
    found += [("transformer", (depth, dim), sizes["batches"][0]) for dim in sizes["dims"] for depth in sizes["depths"]]  # type: ignore[union-attr,index]
    return [Subject(family, size, batch, int(sizes["tokens"]), device) for family, size, batch in found]  # type: ignore[call-overload]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="small networks, for a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="of excited steps; others three times as often")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; more than are idle make times meaningless")
    parser.add_argument("--out", type=Path, help="write the measurements here, too")
    parser.add_argument("--fit", type=Path, help="measure nothing: print the tables of these measurements")
    options = parser.parse_args()
    if options.fit:
        stored = json.loads(options.fit.read_text())
        print(page(stored["where"], [Measurement(**one) for one in stored["measurements"]]))
        return
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    release = torch.__version__.split("+")[0]
    where = f"{torch.cuda.get_device_name()}, torch {release}" if device.type == "cuda" else machine()
    found = []
    for subject in subjects(options.quick, device):
        found.append(measure(subject, options.repeats))
        if options.out:
            stored = {"where": where, "measurements": [asdict(one) for one in found]}
            options.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(page(where, found))


if __name__ == "__main__":
    main()
