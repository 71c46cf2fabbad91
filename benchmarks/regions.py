"""Bounds in empty regions (What training reveals, Theorem 2): time, and the program beside the explicit Kronecker program.

    python -m benchmarks.regions [--points 10000] [--training 200] [--repeats 3]

Trained networks of depth 5 on the paper's first task (`Frequencies`), new points all over the plane of the data; and random
networks where more points are reached, so that more programs are solved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from benchmarks.timing import machine
from excite.bounds import empty_region
from excite.bounds.relu_network import as_module, relu_network
from excite.bounds.trajectory.patterns import patterns
from excite.bounds.trajectory.pursuit import pursue


def network(widths: tuple[int, ...], seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for n, m in pairwise(widths):
        weight, bias = (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1 for shape in ((m, n), (m,)))
        pairs.append((weight / n**0.5, bias / n**0.5))
    return as_module(pairs)


def fitted(widths: tuple[int, ...], training: int, steps: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network trained on cos(πz₁) cos(πz₂) for a while, its training points, and the plane (10, 2) they lie in."""
    generator = torch.Generator().manual_seed(1)
    z = 2 * torch.rand(training, 2, generator=generator, dtype=torch.float64) - 1
    plane = torch.linalg.qr(torch.randn(10, 10, generator=generator, dtype=torch.float64)).Q[:, :2]
    x, y = 10 * z @ plane.T, torch.cos(torch.pi * z).prod(1)
    model = network(widths)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
    return model, x, plane


def timed(model: nn.Module, x: Tensor, new: Tensor, repeats: int, what: str) -> str:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = empty_region(model, x, None, new)
        seconds.append(time.perf_counter() - start)
    terms = found.terms
    return (
        f"| {what} | {len(x)} | {len(new)} | {terms['patterns']} | {terms['rank']} | {found.share:.1%} | {found.share_empty:.1%} | "
        f"{terms['programs']} | {statistics.median(seconds):.2f} |"
    )


def explicit(model: nn.Module, x: Tensor, new: Tensor) -> tuple[float, float, float]:
    """Largest difference to the explicit program, and the seconds of both."""
    net = relu_network(model, x)
    columns, points = ([layer.numpy() for layer in patterns(net, some)] for some in (x, new))
    cost = np.random.default_rng(0).random(len(x)) + 0.1
    start = time.perf_counter()
    ours = pursue(columns, cost, points, 1.0)
    middle = time.perf_counter()
    matrix, sides = (
        np.stack(
            [reduce(np.kron, [layer[i].astype(float) for layer in reversed(layers)]) for i in range(len(layers[0]))], 1
        )
        for layers in (columns, points)
    )
    worst = 0.0
    for value, side in zip(ours.values, sides.T):
        both = np.hstack([matrix, -matrix])
        found = linprog(np.tile(cost, 2), A_eq=both, b_eq=side, method="highs")
        if (found.status == 0) != bool(np.isfinite(value)):
            raise ArithmeticError("one program has a solution, the other none")
        if found.status == 0:
            worst = max(worst, abs(found.fun - float(value)))
    return worst, middle - start, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--training", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"## Empty regions\n\n{machine()}\n")
    print(
        "| network | training points | new points | patterns | rank | reached | of empty regions | programs | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    generator = torch.Generator().manual_seed(2)
    for widths in ((10, 10, 32, 32, 32, 1), (10, 10, 32, 1)):
        model, x, plane = fitted(widths, options.training, 600)
        new = 20 * torch.rand(options.points, 2, generator=generator, dtype=torch.float64) - 10
        what = f"trained {'-'.join(map(str, widths))}, in the plane of the data"
        print(timed(model, x, new @ plane.T, options.repeats, what), flush=True)
    for widths in ((10, 6, 6, 6, 6, 1), (2, 8, 8, 8, 8, 1), (10, 10, 32, 32, 32, 1)):
        model = network(widths)
        x, new = (
            2 * torch.randn(n, widths[0], generator=generator, dtype=torch.float64)
            for n in (options.training, options.points)
        )
        print(timed(model, x, new, options.repeats, f"random {'-'.join(map(str, widths))}"), flush=True)
    model = network((10, 60, 1))
    x, new = (2 * torch.randn(n, 10, generator=generator, dtype=torch.float64) for n in (options.training, 200))
    print(timed(model, x, new, 1, "random 10-60-1: a program for every point"), flush=True)
    print(
        "\n| network | 40 training points, 40 new ones: largest difference | ours, s | explicit, s |\n|---|---|---|---|"
    )
    for widths in ((3, 8, 1), (3, 6, 6, 1), (3, 6, 6, 6, 1)):
        x, new = (2 * torch.randn(40, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        worst, ours, theirs = explicit(network(widths), x, new)
        print(f"| {'-'.join(map(str, widths))} | {worst:.1e} | {ours:.3f} | {theirs:.3f} |", flush=True)


if __name__ == "__main__":
    main()
