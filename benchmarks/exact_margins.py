"""Margins of random small networks beside the exact values of mixed-integer programs.

    python -m benchmarks.exact_margins [--nets 200] [--first 1000] [--norms inf 1]

Prints how often the search of `excite.margins` ends within 1 % of the exact margin, whether it was ever below, and whether the
certified lower bound was ever above. Aim: within 1 % at 95 % of the points, never below, never above. Each network's result is
stored under --out (runs/exact_margins) and not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from excite.margin import SearchOptions, margins

EXACT = SearchOptions(steps=10, restarts=2, evidence=False, certify="exact", seconds=1e6)  # never out of time
SEARCH = SearchOptions(evidence=False, certify="linear")
NEAR, AIM = 1.01, 0.95
_TOLERANCE = 1e-6  # of the solver, relative


def random_net(seed: int) -> tuple[nn.Module, Tensor, Tensor, dict[str, Any]]:
    """A network of 2 to 16 inputs with two hidden layers, three points, their decisions, and threshold and bounds."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inputs, hidden, outputs = (2, 4, 6, 8, 16)[seed % 5], (6, 10, 12)[seed % 3], (1, 3, 2, 5)[seed % 4]
        bend = (nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh(), nn.ReLU())[seed // 2 % 4]
        model = nn.Sequential(
            nn.Linear(inputs, hidden), bend, nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )
        x = torch.rand(3, inputs) * 2 - 1
    f = model(x).detach()
    threshold = float(f.median()) + 0.05
    y = (f[:, 0] > threshold).long() if outputs == 1 else f.argmax(1)
    return model, x, y, {"threshold": threshold, "bounds": (-1, 1)}


@dataclass(frozen=True)
class Comparison:
    """Points searched, within 1 % of the exact margin, below it, and with a lower bound above it."""

    points: int = 0
    near: int = 0
    below: int = 0
    above: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    @property
    def met(self) -> bool:
        return self.near >= AIM * self.points and not self.below and not self.above


def compare(seed: int, norm: str) -> Comparison:
    """The search on the network of one seed beside the exact values."""
    model, x, y, how = random_net(seed)
    exact, found = (margins(model, x, y, norm=norm, **how, options=options) for options in (EXACT, SEARCH))
    assert exact.lower is not None
    assert found.lower is not None
    return Comparison(
        points=len(x),
        near=int((found.values <= NEAR * exact.lower).sum()),
        below=int((found.values < exact.lower * (1 - _TOLERANCE)).sum()),
        above=int((found.lower > exact.values * (1 + _TOLERANCE)).sum()),
    )


def stored(seed: int, norm: str, folder: Path) -> Comparison:
    """The same, from its file if there is one."""
    path = folder / norm / f"{seed}.json"
    if not path.exists():
        start = time.monotonic()
        values = vars(compare(seed, norm))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**values, "seconds": round(time.monotonic() - start, 1)}))
    values = json.loads(path.read_text())
    values.pop("seconds")
    return Comparison(**values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=200)
    parser.add_argument("--first", type=int, default=1000, help="seed of the first network")
    parser.add_argument("--norms", nargs="+", default=("inf", "1"), choices=("inf", "1"))
    parser.add_argument("--out", type=Path, default=Path("runs/exact_margins"))
    options = parser.parse_args()
    columns = ("norm", "networks", "points", "within 1 % of the exact margin", "below it", "lower bounds above it", "")
    print(f"| {' | '.join(columns)} |\n|---|--:|--:|--:|--:|--:|---|")
    for norm in options.norms:
        seeds = range(options.first, options.first + options.nets)
        total = sum((stored(seed, norm, options.out) for seed in seeds), Comparison())
        print(
            f"| {norm} | {options.nets} | {total.points} | {total.near / total.points:.1%} | {total.below} | {total.above} | "
            f"{'met' if total.met else '**missed**'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
