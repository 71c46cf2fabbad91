"""Richness of all layers beside the forward passes alone, and smallest eigenvalues of units beside a loop of eigvalsh.

    python -m benchmarks.richness [--data FOLDER] [--images 10000] [--repeats 5] [--units]

Images of CIFAR-10 if the data is in FOLDER or in EXCITE_DATA, else random ones; the papers' network, untrained. Memory is
the peak of a process of its own, above its peak while it only runs the model (Linux only). --units judges every unit of
the whole network on all images as well, which takes minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import machine, race, ratio
from excite.data import load
from excite.errors import ExciteError
from excite.probes import richness, smallest_eigenvalues
from excite.probes.activation_rank.smallest import Smallest, default_tolerance
from excite.train.models.architectures import build

BATCH = 250


def images(folder: str | None, count: int) -> tuple[str, Tensor]:
    try:
        x = load("cifar10", root=folder).x_train[:count]
        return "CIFAR-10", x.contiguous()
    except ExciteError:
        return "random", torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


def forward(x: Tensor) -> None:
    model = build("papers-cnn", seed=0).eval()
    with torch.no_grad():
        for part in x.split(BATCH):
            model(part)


def layers(x: Tensor, units: bool = False) -> None:
    richness(build("papers-cnn", seed=0), x, units=units, batch=BATCH)


def above_forward(job: str, x: Tensor, threads: int) -> float:
    """The largest memory of a process while it does a job, above that while it runs the model only, in MB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_above_forward, (job, x, threads))


def _above_forward(job: str, x: Tensor, threads: int) -> float:
    torch.set_num_threads(threads)
    peaks = []
    for run in (forward, forward, {"layers": layers, "units": lambda x: layers(x, units=True)}[job]):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
        run(x)
        status = Path("/proc/self/status").read_text()
        peaks.append(int(status.split("VmHWM:")[1].split()[0]) / 1e3)
    return peaks[2] - peaks[1]


def matrices(x: Tensor, layer: int = 7) -> tuple[list[Tensor], list[int]]:
    """The sums of outer products of the points that activate each unit of the 800-wide layer, and how many these are."""
    model = build("papers-cnn", seed=0).eval()
    with torch.no_grad():
        h = torch.cat([model[:layer](part) for part in x.split(BATCH)])
        active = model[layer](h) > 0
    h = h.double()
    return [second(h[mine]) for mine in active.T], active.sum(0).tolist()


def second(rows: Tensor) -> Tensor:
    return rows.T @ rows


def loop(stack: list[Tensor]) -> list[Tensor]:
    return [torch.linalg.eigvalsh(matrix) for matrix in stack]


def ours(stack: list[Tensor], points: list[int], tolerance: float) -> list[Smallest]:
    return smallest_eigenvalues(stack, tolerance, points=points)


def compared(stack: list[Tensor], points: list[int], repeats: int, what: str) -> str:
    tolerance = default_tolerance(stack[0].shape[-1], torch.float32)
    times = race({"loop": lambda: loop(stack), "ours": lambda: ours(stack, points, tolerance)}, repeats, warm=1)
    truth, found = loop(stack), ours(stack, points, tolerance)
    wrong = sum(one.rank != int((all_ > tolerance * all_[-1]).sum()) for one, all_ in zip(found, truth))
    error = max(_error(one, all_) for one, all_ in zip(found, truth))
    middle, low, high = ratio(times["loop"], times["ours"])
    return (
        f"| {what} | {statistics.median(times['loop']):.2f} | {statistics.median(times['ours']):.2f} | "
        f"{middle:.2f} ({low:.2f}–{high:.2f}) | {sum(one.excited for one in found)} of {len(found)} | {wrong} | "
        f"{max(one.error for one in found):.1e} | {error:.1e} |"
    )


def _error(one: Smallest, eigenvalues: Tensor) -> float:
    return abs(one.value - float(eigenvalues[0])) / float(eigenvalues[-1]) if float(eigenvalues[-1]) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder that holds CIFAR-10; else EXCITE_DATA")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=4000, help="for the units of the 800-wide layer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--units", action="store_true", help="time and memory of judging all units, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name, x = images(options.data, options.images)
    print(f"## Richness of activations\n\nPapers' network, {len(x)} images ({name}); {machine()}\n")
    times = race({"forward": lambda: forward(x), "richness": lambda: layers(x)}, options.repeats, warm=1)
    middle, low, high = ratio(times["richness"], times["forward"])
    above = above_forward("layers", x, options.threads)
    print("| | seconds | over forward passes alone | memory above them |\n|---|---|---|---|")
    print(f"| forward passes | {statistics.median(times['forward']):.2f} | 1 | |")
    spread = f"{middle:.2f} ({low:.2f}–{high:.2f})"
    print(f"| richness of all layers | {statistics.median(times['richness']):.2f} | {spread} | {above:.0f} MB |")
    if options.units:
        start = time.perf_counter()
        above = above_forward("units", x, options.threads)
        print(f"| and every unit judged | {time.perf_counter() - start:.0f} | | {above:.0f} MB |")
    print(f"\nSmallest eigenvalues of the 240 units of the 800-wide layer, {options.points} images\n")
    print(
        "| matrices | loop of eigvalsh, s | ours, s | times faster | excited | verdicts wrong | error stated | error found |"
    )
    print("|---|---|---|---|---|---|---|---|")
    stack, points = matrices(x[: options.points])
    print(compared(stack, points, options.repeats, "as they come"), flush=True)
    generator = torch.Generator().manual_seed(0)
    rich = torch.randn(options.points, 800, dtype=torch.float64, generator=generator).relu()
    side = torch.randn(800, 240, dtype=torch.float64, generator=generator)
    active = (rich - rich.mean(0)) @ side > 0
    stack = [second(rich[mine]) for mine in active.T]
    print(compared(stack, active.sum(0).tolist(), options.repeats, "of rich activations"), flush=True)


if __name__ == "__main__":
    main()
