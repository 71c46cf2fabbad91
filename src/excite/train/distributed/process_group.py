"""The process group of torchrun, and the device of each process."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from excite._core.distributed import let_go
from excite.errors import InputError, one_line

_START = "start with torchrun --nproc-per-node N -m excite train CONFIG, or unset WORLD_SIZE for one process"

_stores: list[Any] = []
_groups = itertools.count()


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes that WORLD_SIZE names; 1 without it."""
    return _number(environment, "WORLD_SIZE", minimum=1) if "WORLD_SIZE" in environment else 1


def init_process_group(name: str, wait: float) -> tuple[int, int, torch.device, Any]:
    """Initializes the process group that the environment describes: gloo on the CPU, NCCL on GPUs.

    Args:
        name: "cpu", "cuda" or "auto".
        wait: Timeout in seconds for the other processes to join.

    Returns:
        Rank, world size, device, and the store of the group.

    Raises:
        InputError: If the environment is invalid or the processes cannot reach each other.
    """
    size = world_size()
    missing = [key for key in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(key)]
    if missing:
        raise InputError(f"WORLD_SIZE is {size}, but {missing[0]} is not set: {_START}")
    rank = _number(os.environ, "RANK")
    if rank >= size:
        raise InputError(f"RANK is {rank}, but WORLD_SIZE is {size}: {_START}")
    _number(os.environ, "LOCAL_RANK")
    if not dist.is_available():
        raise InputError("this build of torch has no torch.distributed: train on one process, or install another build")
    device = local_device(name, local_rank(rank), local_size(rank))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        from torch.distributed.rendezvous import rendezvous

        # One store for all groups of this process, with a prefix for each: a second store could not bind to the port again.
        if not _stores:
            _stores.append(next(rendezvous("env://", rank, size, timeout=timedelta(seconds=wait)))[0])
        store = dist.distributed_c10d.PrefixStore(f"excite/{next(_groups)}", _stores[0])
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, device_id=device)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError, OSError) as error:
        destroy_process_group()
        raise InputError(f"the {size} processes could not connect at {address}: {one_line(error)[:200]}") from error
    return rank, size, device, store


def destroy_process_group(abort: bool = False) -> None:
    """Destroys the process group; with `abort`, pending collectives of other ranks fail."""
    if not dist.is_available() or not dist.is_initialized():
        return
    if abort:
        with contextlib.suppress(Exception):  # not every backend can
            dist.group.WORLD.abort()  # type: ignore[union-attr]
    let_go()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def local_rank(rank: int) -> int:
    """Returns the rank of this process on its machine."""
    number = os.environ.get("LOCAL_RANK", "")
    if number.isdecimal():
        return int(number)
    return rank % torch.cuda.device_count() if torch.cuda.is_available() else rank


def local_size(rank: int) -> int:
    """Returns the number of processes on this machine, as far as known."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else local_rank(rank) + 1


def local_device(name: str, number: int, count: int) -> torch.device:
    """Returns the device of process `number` of `count` on this machine: a GPU of its own, or the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InputError(f"device {name!r}: several processes take 'cpu', 'cuda' (a GPU each) or 'auto'")
    if name == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > gpus:
        raise InputError(
            f"{count} processes on this machine, but it has {gpus or 'no'} GPU{'s' if gpus != 1 else ''}: every process "
            f"needs one; {f'start {gpus} (--nproc-per-node {gpus}), or ' if gpus else ''}set device = 'cpu'"
        )
    return torch.device("cuda", number)


def _number(environment: Mapping[str, str], name: str, minimum: int = 0) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < minimum:
        raise InputError(f"{name}: expected an integer of at least {minimum}; got {text!r}: {_START}")
    return int(text)
