"""The processes that train one model together: how they meet, agree, and end when one of them does."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from excite.errors import ExciteError, InputError, TrainingStopped, one_line
from excite.train.distributed.process_group import asked, leave, local_device, local_rank, local_size, meet

_FAILED = "failed"  # key in the store: who failed first, and why


class OtherProcess(ExciteError):
    """Another of the processes failed, and says why: this one ends with it."""

    def __init__(self, message: str, lost: bool = False):
        super().__init__(message)
        self.lost = lost  # gone without a word, or interrupted: the training can go on


class Lost(TrainingStopped):
    """A process is gone without a word."""

    lost = True


class Processes:
    """This process among those that train one model: `rank` of `size`, on `device`. One process alone is rank 0 of 1."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Any = None):
        self.rank, self.size, self.device = rank, size, device
        self.first_of_machine = size == 1 or local_rank(rank) == 0
        self._store = store
        self._agreed: BaseException | None = None  # raised by all of them at the same place
        self._told, self._parted = False, False

    @property
    def first(self) -> bool:
        """The process that writes the run and prints."""
        return self.rank == 0

    def wrap(self, model: nn.Module, sharded: bool = False) -> nn.Module:
        """The model for training: in DistributedDataParallel, or `sharded` by FSDP2, in place. Alone: the model itself.

        All processes begin with the weights of the first one. Make the optimizer afterwards.
        """
        if self.size == 1:
            return model
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError("the model has no parameters to train")
        if sharded:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.data, 0)
            return _shard(model, self.device)
        # Buffers are made equal after every step (see `excite.train.distributed.data_parallel`), for sharded models as well.
        # That was called broadcast_buffers before torch 2.13.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = {name: False for name in ("forward_sync_buffers", "broadcast_buffers") if name in known}
        options: dict[str, Any] = dict([*buffers.items()][:1])
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, devices, gradient_as_bucket_view=True, **options)

    # -- agreeing ------------------------------------------------------------------------------------------------
    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_same(self, what: Mapping[str, object]) -> None:
        """Refuse to train together what is not the same in all processes, by name."""
        for rank, theirs in enumerate(values := self.everyone(dict(what))):
            for name, value in theirs.items():
                if value != values[0][name]:
                    shown = f": {value} there, {values[0][name]} in process 0" if len(str(value)) < 40 else ""
                    raise self.as_one(InputError(f"process {rank} of {self.size} has another {name}{shown}"))

    def place(self, name: str) -> torch.device:
        """The device of this process, for the device that a config names."""
        return local_device(name, local_rank(self.rank), local_size(self.rank))

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """What fails inside in one process fails in all, after they have all come to the end; nothing collective inside."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            problem = error
        told = self.everyone(None if problem is None else one_line(problem))
        failed = next((rank for rank, text in enumerate(told) if text is not None), None)
        if failed is None:
            return
        if failed == self.rank and problem is not None:
            self._agreed = problem
            raise problem
        self._agreed = OtherProcess(f"process {failed} of {self.size} failed: {told[failed]}")
        raise self._agreed from problem

    def as_one(self, error: Exception) -> Exception:
        """An error that every process meets at this place: the first one says it."""
        self._agreed = error if self.first else OtherProcess(f"process 0 of {self.size} failed: {one_line(error)}")
        return self._agreed

    # -- ending --------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """What ends one process ends the others: each hears why, and none waits for one that is gone."""
        try:
            yield
        except BaseException as error:
            if self.size == 1 or self._told or error is self._agreed:
                raise
            told = self._tell(error)
            if told is error:
                raise
            raise told from error

    @contextlib.contextmanager
    def ending_when_told(self) -> Iterator[None]:
        """torchrun ends the others (SIGTERM) when one has failed: as by Ctrl-C, so that the run is closed and says why."""

        def end(number: int, frame: object) -> None:
            if not self._told or self._parted:  # else it is ending already
                raise KeyboardInterrupt

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def part(self) -> None:
        """What follows is for each process alone: none waits for another any more."""
        self._told = self._parted = True
        leave()

    def _tell(self, error: BaseException) -> BaseException:
        """Say to the others what happened here, unless they were faster; leave the group. What to raise here."""
        self._told = True
        kind = "lost" if _is_about_others(error) else "failed" if isinstance(error, Exception) else "stopped"
        told = mine = f"{self.rank} {kind} {one_line(error)}"
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may be gone with the process that held it
                told = self._store.compare_set(_FAILED, "", mine).decode()
        leave(abort=True)
        rank, kind, text = told.split(" ", 2)
        if kind == "lost":
            text = f"one of the {self.size} processes is gone (killed, or its machine is): start the same command again to continue"
            return Lost(text) if told == mine else OtherProcess(text, lost=True)
        if kind == "stopped":
            text = f"process {rank} of {self.size} was interrupted: start the same command again to continue"
            return OtherProcess(text, lost=True) if isinstance(error, Exception) else error
        return error if told == mine else OtherProcess(f"process {rank} of {self.size} failed: {text}")


_current: Processes | None = None


def alone(device: str = "cpu") -> Processes:
    return Processes(0, 1, torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu"))


def these_processes() -> Processes:
    """Those of the process group that is there; without one, this process alone."""
    if not dist.is_available() or not dist.is_initialized():
        return alone()
    if _current is not None:
        return _current
    rank = dist.get_rank()
    cuda = torch.cuda.is_available() and "nccl" in str(dist.get_backend())
    device = torch.device("cuda", local_rank(rank)) if cuda else torch.device("cpu")
    return Processes(rank, dist.get_world_size(), device)


@contextlib.contextmanager
def many_processes(device: str = "auto", wait: float = 300.0) -> Iterator[Processes]:
    """Meet the other processes that torchrun started, and part from them at the end; alone without torchrun.

        with many_processes() as here:
            model = here.wrap(Net().to(here.device))
            ...

    `device`: "cpu", "cuda" (each process of a machine has a GPU of its own) or "auto". A group that is there already is used
    and left as it is. `wait`: seconds for the others to come.
    """
    global _current
    there = dist.is_available() and dist.is_initialized()
    with said_once():
        here = these_processes() if there else alone(device) if asked() == 1 else Processes(*meet(device, wait))
    if there or here.size == 1:
        yield here
        return
    _current = here
    try:
        with here.ending_together(), here.ending_when_told():
            yield here
    finally:
        _current = None
        leave()


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """What is wrong before the processes have met is wrong in all of them: the first of each machine says it."""
    try:
        yield
    except ExciteError as error:
        if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise OtherProcess(one_line(error)) from error


# -- inside --------------------------------------------------------------------------------------------------------------
def _is_about_others(error: BaseException) -> bool:
    """Whether a collective failed, rather than something of this process."""
    words = ("gloo", "NCCL", "ncclComm", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in str(error) for word in words)
    )


def _shard(model: nn.Module, device: torch.device) -> nn.Module:
    """FSDP2 on every child that has parameters and is called, blocks inside lists one by one; then on the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def blocks(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                yield from blocks(child)
            elif any(True for _ in child.parameters()):
                yield child

    # Without a mesh FSDP2 takes the machine's GPUs, also for processes that train on the CPU.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in dict.fromkeys(blocks(model)):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
