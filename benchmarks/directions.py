"""How near the search for the direction of several outputs comes to the exact answer, and what it costs.

On linear models the largest move max ‖W d‖₂ over the unit ball of d is known: from the corners of the ball (infinity norm,
1-norm), or as the top singular value. The time is that of a loss with its backward pass on the papers' network.

    python -m benchmarks.directions            # starts of the search, on linear models
    python -m benchmarks.directions --turns    # turns of the search, on a network for digits
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn

from excite import PersistentExcitation
from excite.data import Dataset, load
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


def seconds(norm: str, repeats: int, options: dict[str, Any], outputs: int = 10) -> float:
    """The least processor time of a loss and its backward pass."""
    torch.manual_seed(0)
    model, x, y = build("papers-cnn", outputs=outputs), torch.rand(50, 3, 32, 32), torch.arange(50) % outputs
    if outputs == 1:
        pe, y = PersistentExcitation(model, 0.02, norm=norm, **options), torch.arange(50) % 2
    else:
        pe = PersistentExcitation(model, 0.02, norm=norm, classes=outputs, **options)
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        pe.loss(x, y).backward()
        times.append(time.process_time() - begin)
    return min(times)


RADIUS = 0.03


def digits_network(data: Dataset, radius: float | None) -> nn.Module:
    """64-64-48-10 with ReLUs: initialized (radius None), trained plainly (0), or with every layer excited."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    if radius is not None:
        pe = PersistentExcitation(model, radius, classes=10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for _ in range(30):
            for rows in torch.randperm(len(data.x_train)).split(50):
                optimizer.zero_grad()
                pe.loss(data.x_train[rows], data.y_train[rows]).backward()
                optimizer.step()
    return model


def movement(model: nn.Module, x: Tensor, options: dict[str, Any]) -> Tensor:
    """‖f(x; d1) − f(x; d2)‖ of each point."""
    low, high = PersistentExcitation(model, RADIUS, classes=10, **options).extremes(x)
    return (high - low).norm(dim=1)


def turns_table(repeats: int) -> None:
    """By number of turns: the median movement over that of twenty starts with ten turns, and the time of a step."""
    data = load("digits")
    networks = [digits_network(data, radius) for radius in (None, 0.0, RADIUS)]
    best = [movement(model, data.x_test, {"turns": 10, "starts": 20}) for model in networks]
    for model, name in zip(networks, ("initialized", "after plain training", "after excited training")):
        accuracy = (model(data.x_test).argmax(1) == data.y_test).float().mean()
        print(f"{name}: test accuracy {accuracy:.1%}")
    one_output = {steps: seconds("inf", repeats, {"steps": steps}, outputs=1) for steps in (4, 1)}
    for turns in range(3):
        reach = [
            (movement(model, data.x_test, {"turns": turns}) / most).median() for model, most in zip(networks, best)
        ]
        times = [seconds("inf", repeats, {"steps": steps, "turns": turns}) / one_output[steps] for steps in (4, 1)]
        cells = [f"{value:.3f}" for value in reach] + [f"{value:.2f}" for value in times]
        print(f"| {turns}{' (default)' if turns == 1 else ''} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=40, help="linear models for each number of outputs")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps")
    parser.add_argument("--turns", action="store_true", help="the turns of the search instead of its starts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.turns:
        turns_table(args.repeats)
        return
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
