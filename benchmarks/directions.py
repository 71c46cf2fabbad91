"""How near the search for the direction of several outputs comes to the exact answer, and what it costs.

On linear models the largest move max ‖W d‖₂ over the unit ball of d is known: from the corners of the ball (infinity norm,
1-norm), or as the top singular value. The time is that of a loss with its backward pass on the papers' network.

    python -m benchmarks.directions
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn

from excite import PersistentExcitation
from excite.train.models.architectures import build

NORMS = ("inf", "2", "1")
VARIANTS: dict[str, dict[str, Any]] = {
    "`turns=0`": {"turns": 0},
    "`starts=1` (default)": {},
    "`starts=2`": {"starts": 2},
    "`starts=4`": {"starts": 4},
    "`starts=8`": {"starts": 8},
    "`starts=4, turns=2`": {"starts": 4, "turns": 2},
}


def largest_move(weight: Tensor, norm: str) -> Tensor:
    """max ‖W d‖₂ over ‖d‖ ≤ 1."""
    if norm == "2":
        return torch.linalg.svdvals(weight)[0]
    if norm == "1":
        return weight.norm(dim=0).max()
    corners = torch.tensor(list(itertools.product((1.0, -1.0), repeat=weight.shape[1])), dtype=weight.dtype)
    return (corners @ weight.T).norm(dim=1).max()


def reached(norm: str, trials: int, options: dict[str, Any]) -> Tensor:
    """The move that is found over the largest there is, of each point."""
    found = []
    for outputs, trial in itertools.product((3, 5, 10), range(trials)):
        torch.manual_seed(1000 * outputs + trial)
        model, x = nn.Linear(8, outputs).double(), torch.randn(4, 8, dtype=torch.float64)
        with torch.no_grad():
            low, high = PersistentExcitation(model, 0.1, norm=norm, classes=outputs, **options).extremes(x)
        found.append((high - low).norm(dim=1) / 0.2 / largest_move(model.weight.detach(), norm))
    return torch.cat(found)


def seconds(norm: str, repeats: int, options: dict[str, Any]) -> float:
    """The least processor time of a loss and its backward pass."""
    torch.manual_seed(0)
    model, x, y = build("papers-cnn", outputs=10), torch.rand(50, 3, 32, 32), torch.arange(50) % 10
    pe = PersistentExcitation(model, 0.02, norm=norm, classes=10, **options)
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        pe.loss(x, y).backward()
        times.append(time.process_time() - begin)
    return min(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=40, help="linear models for each number of outputs")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    usual = seconds("inf", args.repeats, {})
    for name, options in VARIANTS.items():
        cells = []
        for norm in NORMS:
            found = reached(norm, args.trials, options)
            cells.append(f"{found.mean():.2f}, {found.min():.2f}")
        times = [seconds(norm, args.repeats, options) / usual for norm in ("inf", "1")]
        print(f"| {name} | {' | '.join(cells)} | {times[0]:.2f}, 1-norm {times[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
