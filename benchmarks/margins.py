"""Margins of test images on the papers' network: time and quality beside Foolbox.

    python -m benchmarks.margins [--data FOLDER] [--points 500] [--repeats 3] [--epochs 5] [--networks plain excited]

Trains the network plainly and with every layer excited, on CIFAR-10 planes against horses if the data is in FOLDER or
in EXCITE_DATA, else on digits 8 against 1 enlarged to 32 × 32. Prints a table in Markdown for each. Evidence and
certificates are left out of the time, as Foolbox has none. The networks are stored under --out (runs/margins) and not trained again.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import machine, ratio
from excite.data import load
from excite.errors import ExciteError
from excite.excitation import PersistentExcitation
from excite.margin import SearchOptions, margins
from excite.train.models.architectures import build

BOUNDS = (-1.0, 1.0)
RADIUS = 0.02
GRID = [0.005 * 1.35**k for k in range(14)]  # up to 0.25


class TwoLogits(nn.Module):
    """A scalar model as a classifier of two classes, which is what Foolbox takes."""

    def __init__(self, model: nn.Module, threshold: float = 0.5) -> None:
        super().__init__()
        self.model, self.threshold = model, threshold

    def forward(self, x: Tensor) -> Tensor:
        f = self.model(x).reshape(-1) - self.threshold
        return torch.stack([-f, f], 1)


def images(folder: str | None, points: int) -> tuple[str, Tensor, Tensor, Tensor, Tensor]:
    """Name, training images and labels, test images and labels; pixels in [-1, 1]."""
    try:
        data = load("cifar10", classes=("airplane", "horse"), root=folder)
        name = "CIFAR-10, planes against horses"
        x, x_test = data.x_train, data.x_test
    except ExciteError as error:
        print(f"no CIFAR-10 here ({error}); digits instead\n")
        data = load("digits", classes=(8, 1))
        name = "digits, 8 against 1, enlarged"
        x, x_test = (F.interpolate(part, size=32).expand(-1, 3, -1, -1) for part in (data.x_train, data.x_test))
    order = torch.randperm(len(x_test), generator=torch.Generator().manual_seed(0))[:points]
    return name, x.contiguous(), data.y_train, x_test[order].contiguous(), data.y_test[order]


def train(x: Tensor, y: Tensor, epochs: int, excited: bool) -> nn.Module:
    """The papers' training, shortened; the radius grows in four stages from zero."""
    model = build("papers-cnn", seed=0)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)
    for epoch in range(epochs):
        radius = RADIUS * min(3, 4 * epoch // epochs) / 3 if excited else 0.0
        pe = PersistentExcitation(model, radius=radius) if radius else None
        for index in torch.randperm(len(x), generator=generator).split(50):
            if pe is None:
                loss = F.mse_loss(model(x[index]).reshape(-1), y[index].float())
            else:
                loss = pe.loss(x[index], y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def network(x: Tensor, y: Tensor, epochs: int, excited: bool, folder: Path) -> nn.Module:
    """The trained network, from its file if there is one."""
    path = folder / f"{'excited' if excited else 'plain'}-{len(x)}-{epochs}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(train(x, y, epochs, excited).state_dict(), path)
    model = build("papers-cnn", seed=0)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def contenders(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, object]:
    """Name -> function that returns margins (N,); inf where nothing was found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import foolbox

    two = TwoLogits(model).eval()
    wrapped = foolbox.PyTorchModel(two, bounds=BOUNDS, device="cpu")

    def fmn(steps: int) -> Tensor:
        _, found, _ = foolbox.attacks.LInfFMNAttack(steps=steps)(wrapped, x, y, epsilons=None)
        with torch.no_grad():
            broken = two(found).argmax(1) != y
        return torch.where(broken, (found - x).flatten(1).abs().amax(1), torch.inf)

    def grid() -> Tensor:
        _, _, success = foolbox.attacks.LinfPGD(steps=40)(wrapped, x, y, epsilons=GRID)
        values = torch.tensor(GRID)[:, None].expand(-1, len(x))
        return torch.where(success, values, torch.inf).amin(0)

    return {
        "excite.margins": lambda: margins(
            model, x, y, bounds=BOUNDS, options=SearchOptions(evidence=False, certify=False)
        ).values.float(),
        "Foolbox LInfFMNAttack, 300 steps": lambda: fmn(300),
        "Foolbox LInfFMNAttack, 100 steps": lambda: fmn(100),
        f"Foolbox LinfPGD, 40 steps, {len(GRID)} epsilons": grid,
    }


def table(model: nn.Module, x: Tensor, y: Tensor, repeats: int, clock: Callable[[], float] = time.perf_counter) -> str:
    runs = contenders(model, x, y)
    times: dict[str, list[float]] = {name: [] for name in runs}
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        wrong = (model(x).reshape(-1) > 0.5).long() != y
    for _ in range(repeats):
        for name, run in runs.items():
            start = clock()
            found[name] = torch.where(wrong, 0.0, run())  # type: ignore[operator]
            times[name].append(clock() - start)
    ours, reference = found["excite.margins"], times["Foolbox LInfFMNAttack, 300 steps"]
    lines = [
        "| search | seconds | time / FMN 300 | median margin | mean margin found | no adversarial example found | ours ≤ 1.01 × this |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, values in found.items():
        middle, low, high = ratio(times[name], reference)
        broken = values[torch.isfinite(values)]
        share = float((ours <= 1.01 * values).float().mean())
        lines.append(
            f"| {name} | {statistics.median(times[name]):.1f} | {middle:.2f} ({low:.2f}–{high:.2f}) | "
            f"{float(values.median()):.4f} | {float(broken.mean()):.4f} | {int(torch.isinf(values).sum())} | {share:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder that holds CIFAR-10; else EXCITE_DATA")
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=("plain", "excited"), choices=("plain", "excited"))
    parser.add_argument("--out", type=Path, default=Path("runs/margins"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of this process, for a machine that others use")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name, x, y, x_test, y_test = images(options.data, options.points)
    print(
        f"## Margins compared with Foolbox\n\n{name}: {len(x_test)} test images, infinity norm, bounds {BOUNDS}; {machine()}"
        f"{'; seconds of processor time' if options.processor_time else ''}\n"
    )
    clock = time.process_time if options.processor_time else time.perf_counter
    for kind in options.networks:
        excited = kind == "excited"
        model = network(x, y, options.epochs, excited, options.out)
        what = f"every layer excited, radius {RADIUS}" if excited else "trained plainly"
        print(
            f"Papers' network, {what}, {options.epochs} epochs\n\n{table(model, x_test, y_test, options.repeats, clock)}\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
