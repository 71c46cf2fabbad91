"""Minimum-norm attacks on four ResNet-18s by AttackBench's measure: quality against passes and seconds.

    make opponents
    python -m benchmarks.attackbench train [--data FOLDER|FILE.npz] [--device cuda]
    python -m benchmarks.attackbench run [--data …] [--device cuda] [--images 250] [--seconds 400]
    python -m benchmarks.attackbench table [--figure FILE.png] [--page docs/benchmarks-gpu.md]

Networks and cells are stored under --out (runs/attackbench); what is there is not computed again. `run` starts no cell after
--seconds; several may run at once with different --networks or --norms. The first 1,000 test images are left out (--first): the
settings of `excite.margins` were chosen on them. `table` prints the tables in Markdown and draws the figure of what there is.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.attackbench.attacks import NORMS, contenders
from benchmarks.attackbench.cells import cell_path, run_cell
from benchmarks.attackbench.networks import KINDS, read, read_images, save, train

OPPONENTS = Path(__file__).parents[2] / "build" / "opponents"


def train_networks(options: argparse.Namespace) -> None:
    """Trains the networks that are not there yet and prints their accuracy on test images."""
    x, y, x_test, y_test = (part.to(options.device) for part in read_images(options.data))
    x, y = x[: options.train_images], y[: options.train_images]
    for kind in options.networks:
        path = options.out / f"{kind}.pt"
        if path.exists():
            continue
        start = time.monotonic()
        model = train(
            kind, x, y, width=options.width, epochs=options.epochs, seconds=options.seconds, batch=options.batch
        )
        options.out.mkdir(parents=True, exist_ok=True)
        save(model, path)
        model = read(kind, path, options.width).to(options.device)
        with torch.no_grad():
            right = torch.cat([model(part).argmax(1) for part in x_test[:2000].split(500)]) == y_test[:2000]
        print(
            f"{kind}: {len(x)} images, {time.monotonic() - start:.0f} s, test accuracy {float(right.float().mean()):.3f}",
            flush=True,
        )


def run_cells(options: argparse.Namespace) -> None:
    """Runs the cells that are not there yet, the most important ones first; a failure is printed and the next one started."""
    sys.path.append(str(options.opponents))
    torch.backends.cudnn.allow_tf32 = False  # an example at the boundary is to be one in every batch
    start = time.monotonic()
    x, y = (part[options.first :] for part in read_images(options.data)[2:])
    wanted = [c for c in contenders() if not options.attacks or c.name in options.attacks]
    for contender in wanted:
        for norm in options.norms:
            for kind in options.networks if norm in contender.norms else ():
                path = cell_path(options.out, kind, norm, contender.name)
                if path.exists() or not (options.out / f"{kind}.pt").exists():
                    continue
                if time.monotonic() - start > options.seconds:
                    print(f"no time left for {path.stem}", flush=True)
                    continue
                count = min(contender.images, options.images) if options.images else contender.images
                model = read(kind, options.out / f"{kind}.pt", options.width).to(options.device)
                try:
                    points, labels = x[:count].to(options.device), y[:count].to(options.device)
                    cell = run_cell(model, points, labels, norm, contender)
                except Exception:
                    print(f"{path.stem} failed:\n{traceback.format_exc()}", flush=True)
                    continue
                cell.write(path)
                print(
                    f"{path.stem}: {count} images, {cell.seconds:.1f} s, passes {cell.forwards:.0f} + {cell.backwards:.0f}, "
                    f"mean distance {cell.distances[cell.distances < math.inf].mean():.5f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "run", "table"))
    parser.add_argument(
        "--data", help="folder with CIFAR-10 (else EXCITE_DATA), or an .npz file of its images as bytes"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/attackbench"))
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--networks", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--norms", nargs="+", default=NORMS, choices=NORMS)
    parser.add_argument("--attacks", nargs="+", default=[], help="names of attacks; all by default")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of one training; after which no cell is started"
    )
    parser.add_argument("--epochs", type=float, default=15)
    parser.add_argument("--batch", type=int, default=256, help="of training")
    parser.add_argument("--train-images", type=int, default=50_000)
    parser.add_argument("--images", type=int, help="at most, per cell; by default 250, and 1,000 for ours and APGD_t")
    parser.add_argument("--first", type=int, default=1000, help="first test image of those that are attacked")
    parser.add_argument("--opponents", type=Path, default=OPPONENTS)
    parser.add_argument("--figure", type=Path, help="file to draw the figure into")
    parser.add_argument("--page", type=Path, help="draw the figure from the tables in this page, not from cells")
    options = parser.parse_args()
    if options.page is not None and options.figure is None:
        parser.error("--page: expected --figure as well")
    if options.what == "train":
        train_networks(options)
    elif options.what == "run":
        run_cells(options)
    elif options.page is not None:
        from benchmarks.attackbench.figure import draw, rows_of_page

        draw(rows_of_page(options.page), options.figure)
    else:
        from benchmarks.attackbench.tables import show

        show(options.out, options.figure)


if __name__ == "__main__":
    main()
