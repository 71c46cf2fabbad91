"""How processes that torchrun started find each other, and which device each of them takes."""

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
_meetings = itertools.count()


def asked(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes the environment speaks of."""
    return _number(environment, "WORLD_SIZE", least=1) if "WORLD_SIZE" in environment else 1


def meet(name: str, wait: float) -> tuple[int, int, torch.device, Any]:
    """Make the process group that the environment describes: rank, size, device, and the store they share.

    Gloo carries what is on the CPU, NCCL what is on GPUs. `wait`: seconds for the others to come.
    """
    size = asked()
    missing = [key for key in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(key)]
    if missing:
        raise InputError(f"WORLD_SIZE is {size}, but {missing[0]} is not set: {_START}")
    rank = _number(os.environ, "RANK")
    if rank >= size:
        raise InputError(f"RANK is {rank}, but there are {size} processes (WORLD_SIZE): {_START}")
    _number(os.environ, "LOCAL_RANK")
    if not dist.is_available():
        raise InputError("this build of torch has no torch.distributed: train on one process, or install another build")
    device = local_device(name, local_rank(rank), local_size(rank))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        from torch.distributed.rendezvous import rendezvous

        # One store for all meetings of a process, with names of its own for each: old ones would lead to closed doors.
        if not _stores:
            _stores.append(next(rendezvous("env://", rank, size, timeout=timedelta(seconds=wait)))[0])
        store = dist.distributed_c10d.PrefixStore(f"excite/{next(_meetings)}", _stores[0])
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, device_id=device)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError, OSError) as error:
        leave()
        raise InputError(f"the {size} processes did not meet at {place}: {one_line(error)[:200]}") from error
    return rank, size, device, store


def leave(abort: bool = False) -> None:
    """End the process group; `abort` what others still wait for."""
    if not dist.is_available() or not dist.is_initialized():
        return
    if abort:
        with contextlib.suppress(Exception):  # not every backend can
            dist.group.WORLD.abort()  # type: ignore[union-attr]
    let_go()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def local_rank(rank: int) -> int:
    """The number of this process on its machine."""
    given = os.environ.get("LOCAL_RANK", "")
    if given.isdecimal():
        return int(given)
    return rank % torch.cuda.device_count() if torch.cuda.is_available() else rank


def local_size(rank: int) -> int:
    """How many processes are on this machine, as far as it is known."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else local_rank(rank) + 1


def local_device(name: str, number: int, count: int) -> torch.device:
    """The device of process `number` of `count` on this machine: a GPU of its own, or the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InputError(f"device {name!r}: several processes take 'cpu', 'cuda' (a GPU each) or 'auto'")
    if name == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > there:
        raise InputError(
            f"{count} processes on this machine, but it has {there or 'no'} GPU{'s' if there != 1 else ''}: every process "
            f"needs one; {f'start {there} (--nproc-per-node {there}), or ' if there else ''}set device = 'cpu'"
        )
    return torch.device("cuda", number)


def _number(environment: Mapping[str, str], name: str, least: int = 0) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{name}: expected a whole number of at least {least}; got {text!r}: {_START}")
    return int(text)
