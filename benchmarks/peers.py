"""What Excite, Cockpit and delve add to a training step.

    python -m benchmarks.peers [--steps 100] [--repeats 9] [--threads 2]

The papers' network, batch 50, squared error, SGD with momentum; each contestant on its own copy, in turns, in one process.
All measure at every 50th step: Excite its default probes, Cockpit its configuration "economy" (the cheapest: norms and
histograms of gradients, distances, update sizes, three tests of the batch size; no curvature), delve the saturation of each
layer ("lsat"). They measure different things: the table says what one pays, not which is better. Neither Cockpit nor delve
is installed with Excite; what cannot be imported is left out, and said. Both run without torchvision:

    pip install --no-deps cockpit-for-pytorch backpack-for-pytorch einops unfoldNd json-tricks seaborn delve tensorboardX
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

import excite
from benchmarks.ledger import make
from benchmarks.timing import machine, race, ratio

EVERY = 50
Turn = Callable[[], object]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 3, 32, 32, generator=generator), torch.randint(2, (50, 1), generator=generator).float()


def new() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make("papers-cnn")
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, after: Callable[[Any], object]) -> Turn:
    x, y = data()

    def turn() -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            after(loss)

    return turn


def plain(stack: ExitStack, folder: str, count: int) -> Turn:
    return loop(*new(), count, lambda loss: None)


def ours(stack: ExitStack, folder: str, count: int) -> Turn:
    model, optimizer = new()
    watch = stack.enter_context(excite.watch(model, data()[0], f"{folder}/excite", optimizer, strict=True))
    return loop(model, optimizer, count, watch.step)


def cockpit(stack: ExitStack, folder: str, count: int) -> Turn:
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration
    from cockpit.utils.schedules import linear

    model, optimizer = new()
    model = extend(model)
    mean, single = extend(nn.MSELoss()), nn.MSELoss(reduction="none")
    pilot = Cockpit(model.parameters(), quantities=configuration("economy", track_schedule=linear(EVERY)))
    x, y = data()
    done = 0

    def turn() -> None:
        nonlocal done
        for _ in range(count):
            optimizer.zero_grad()
            out = model(x)
            loss, losses = mean(out, y), single(out, y)[:, 0]
            known = {"batch_size": len(x), "individual_losses": losses, "loss": loss, "optimizer": optimizer}
            with pilot(done, info=known):
                loss.backward(create_graph=pilot.create_graph(done))
            optimizer.step()
            done += 1

    return turn


def delve(stack: ExitStack, folder: str, count: int) -> Turn:
    from delve import SaturationTracker

    model, optimizer = new()
    with contextlib.redirect_stdout(io.StringIO()):
        tracker = SaturationTracker(
            f"{folder}/delve", "csv", model, stats=["lsat"], device="cpu", log_interval=EVERY, include_conv=True
        )
    stack.callback(tracker.close)
    done = 0

    def after(loss: Any) -> None:
        nonlocal done
        done += 1
        if done % EVERY == 0:
            tracker.add_saturations()

    return loop(model, optimizer, count, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps in one timed turn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    contestants = {"plain": plain, "plain again": plain, "Excite, default probes": ours}
    print(f"## Watching, beside other tools\n\nThe papers' network, batch 50; {machine()}\n", flush=True)
    made: dict[str, Turn] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name, contestant in contestants.items():
            made[name] = contestant(stack, folder, options.steps)
        for package, contestant in {"cockpit-for-pytorch": cockpit, "delve": delve}.items():
            try:
                turn = contestant(stack, folder, options.steps)
                turn()
                what = "economy" if contestant is cockpit else "saturation of layers"
                made[f"{package} {version(package)}, {what}"] = turn
            except Exception as error:
                print(f"{package} is left out: {type(error).__name__}: {' '.join(str(error).split())}\n", flush=True)
        with contextlib.redirect_stdout(io.StringIO()):
            times = race(made, options.repeats, warm=1)
    print("| | step, ms | adds |\n|---|---|---|")
    for name, found in times.items():
        middle, low, high = ratio(found, times["plain"])
        step = statistics.median(found) / options.steps * 1e3
        print(f"| {name} | {step:.2f} | {middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}) |", flush=True)


if __name__ == "__main__":
    main()
