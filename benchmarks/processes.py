"""The papers' network with excitation: two processes over gloo, one thread each, against one process with one thread.

    python -m benchmarks.processes [--steps 20] [--repeats 9] [--processes 2] [--sharded]

The steps are those of `excite train` (papers-cnn, batch 50, all layers, radius 0.02, 4 search steps), without run and
watch. All processes are started once; in each repeat first one alone trains, then the group, the others asleep.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.timing import machine, ratio
from excite.excitation import PersistentExcitation
from excite.train import fit, make_model, many_processes

BATCH = 50


def worker(orders: Connection, steps: int, environment: dict[str, str], sharded: bool) -> None:
    """Train for `steps` steps whenever asked to; answers with the seconds they took."""
    os.environ |= environment
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(steps * BATCH, 3, 32, 32, generator=generator) - 1
    y = torch.randint(2, (len(x),), generator=generator).float()  # as for a regression: no accuracies, steps alone
    data = SimpleNamespace(x_train=x, y_train=y, x_test=x[:0], y_test=y[:0])
    with many_processes("cpu") as processes:
        model = processes.wrap(make_model("papers-cnn", seed=0), sharded)
        excitation = PersistentExcitation(model, 0.02, bounds=(-1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)
        orders.send("ready")
        while orders.recv():
            start = time.perf_counter()
            fit(model, data, excitation.loss, optimizer, epochs=1, batch=BATCH, excitation=excitation)
            orders.send(time.perf_counter() - start)


def start(size: int, steps: int, sharded: bool) -> list[tuple[Any, Connection]]:
    """The processes of one contestant, and the pipes to them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    context = multiprocessing.get_context("spawn")
    for rank in range(size):
        environment = {
            "WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, steps, environment, sharded), daemon=True)
        process.start()
        started.append((process, ours))
    for _, pipe in started:
        pipe.recv()
    return started


def seconds(group: list[tuple[Any, Connection]]) -> float:
    for _, pipe in group:
        pipe.send(True)
    return max(pipe.recv() for _, pipe in group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="in each repeat")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sharded", action="store_true", help="FSDP2 instead of DistributedDataParallel")
    options = parser.parse_args()
    torch.set_num_threads(1)
    one = start(1, options.steps, False)
    many = start(options.processes, options.steps, options.sharded)
    for group in (one, many):
        seconds(group)  # the first steps are slower
    alone, together = [], []
    for _ in range(options.repeats):
        alone.append(seconds(one))
        together.append(seconds(many))
    for process, pipe in one + many:
        pipe.send(False)
        process.join(30)
    middle, low, high = ratio(alone, together)
    how = "FSDP2" if options.sharded else "DistributedDataParallel"
    print("## One training on several processes\n")
    print(
        f"papers-cnn with excitation in all layers (radius 0.02, 4 search steps), batch {BATCH}, {options.steps} steps,"
    )
    print(
        f"median of {options.repeats} paired repeats, quartiles of their ratios; one thread for each process: {machine()}.\n"
    )
    print("| | ms per step | times as fast |")
    print("| --- | ---: | ---: |")
    print(f"| one process | {1e3 * statistics.median(alone) / options.steps:.1f} | 1 |")
    each = 1e3 * statistics.median(together) / options.steps
    print(f"| {options.processes} processes over gloo, {how} | {each:.1f} | **{middle:.2f}** ({low:.2f}–{high:.2f}) |")


if __name__ == "__main__":
    main()
