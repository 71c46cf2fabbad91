"""What the processes of tests/train/distributed/test_data_parallel.py do: several trainings that one group goes through in turn."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from excite.train import make_model
from excite.train.distributed.data_parallel import DataParallelTrainer
from excite.train.distributed.processes import many_processes

SIZE = 2


class Double(nn.Module):
    """A network in float64, so that what differs by more than rounding is seen."""

    def __init__(self, kind: str, dropout: float = 0.0, norm: bool = False, idle: bool = False, **options: Any):
        super().__init__()
        inner = make_model(kind, seed=3, **options).double()
        parts = list(inner) if isinstance(inner, nn.Sequential) else [inner]
        last = parts.pop()
        if norm:
            parts.append(nn.BatchNorm1d(last.in_features).double())
        if dropout:
            parts.append(nn.Dropout(dropout))
        self.inner = nn.Sequential(*parts, last)
        self.idle = nn.Linear(2, 2) if idle else None

    def forward(self, x):
        return self.inner(x.double())


def config(name: str = "small-cnn", **changes: Any) -> dict[str, Any]:
    """101 points in batches of 10: eleven steps an epoch, the last with one point for all processes."""
    options = {"kind": name, **changes.pop("options", {})}
    return {
        "data": {"name": "digits", "classes": [3, 8], "train": 101, "test": 33},
        "model": {"name": "process_jobs:Double", "options": options, "sharded": changes.pop("sharded", False)},
        "excitation": {"radius": 0.05, "steps": 2, "bounds": [-1, 1]},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        "epochs": 2, "batch": 10, "seed": 4, "checkpoint_every": "7 steps", "watch": 4, **changes,
    }  # fmt: skip


def meet_at(rank: int, port: int) -> None:
    """What torchrun would put into the environment."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def process(rank: int, port: int, jobs: list[tuple[dict[str, Any], str]], told: str, stop: dict[str, Any]) -> None:
    """One of the processes. `stop`: what to do in which process after which step; writes what it raised to `told`."""
    meet_at(rank, port)
    from excite.train.from_config import train_across

    torch.set_num_threads(1)
    after_update = DataParallelTrainer.after_update

    def stopping(self: DataParallelTrainer, loss: torch.Tensor) -> None:
        after_update(self, loss)
        if "how" in stop and self.step == stop["step"] and rank == stop["rank"]:
            if stop["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if stop["how"] == "interrupt":
                raise KeyboardInterrupt
            if stop["how"] == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
                return
            raise ValueError("this one\ncannot go on")

    DataParallelTrainer.after_update = stopping  # type: ignore[method-assign]
    raised = None
    try:
        with many_processes("cpu", wait=600):
            for config, path in jobs:
                run = train_across(config, path)
                assert (run is not None) == (rank == 0)
    except BaseException as error:
        raised = [type(error).__name__, str(error)]
        if not stop:
            traceback.print_exc(file=sys.stderr)
    with open(f"{told}-{rank}.json", "w") as file:
        json.dump(raised, file)


def example(rank: int, port: int, blocks: list[str], names: str, folder: str) -> None:
    """The examples of a page of the docs, on several processes of a machine without GPUs."""
    import importlib

    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    meet_at(rank, port)
    torch.set_num_threads(1)
    os.chdir(folder)
    given = importlib.import_module(names).given()
    for block in blocks:
        exec(compile(block, "example", "exec"), given)


def parting(rank: int, port: int, times: int) -> None:
    """Exchange something, part, and take the model apart at once, again and again."""
    meet_at(rank, port)
    torch.set_num_threads(1)
    for _ in range(times):
        with many_processes("cpu", wait=600) as here:
            net = here.wrap(nn.Linear(4, 4))
            net(torch.ones(2, 4)).sum().backward()
            for _ in range(4):
                torch.distributed.all_reduce(torch.ones(1))
        del net


def free_port() -> int:
    """Below those that the system gives to outgoing connections: one of these could take it before the processes meet there."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
