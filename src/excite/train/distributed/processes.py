"""The processes that train one model: joining, agreement, and common failure."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from excite.errors import ExciteError, InputError, TrainingStopped, one_line
from excite.train.distributed.process_group import (
    destroy_process_group,
    init_process_group,
    local_device,
    local_rank,
    local_size,
    world_size,
)
from excite.train.stopping import stop_signals

_FAILED = "failed"  # key in the store: which rank failed first, and why


class OtherProcess(ExciteError):
    """Another rank failed; the message says why."""

    def __init__(self, message: str, resumable: bool = False):
        super().__init__(message)
        self.resumable = resumable  # killed or interrupted: the training can be resumed


class RankLost(TrainingStopped):
    """A rank was killed, or its machine is gone."""

    resumable = True


class Processes:
    """This process among those that train one model. A single process is rank 0 of 1.

    Attributes:
        rank: Rank of this process.
        size: Number of processes (world size).
        device: Device of this process.
        first_of_machine: Whether this is the first process on its machine.

    Example:
        >>> with many_processes("cpu") as processes:  # without torchrun: one process
        ...     processes.rank, processes.size
        (0, 1)
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any = None):
        self.rank, self.size, self.device = rank, size, device
        self.first_of_machine = size == 1 or local_rank(rank) == 0
        self._store = store
        self._raised_by_all: BaseException | None = None
        self._reported, self._destroyed = False, False

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the run and prints."""
        return self.rank == 0

    def wrap(self, model: nn.Module, sharded: bool = False) -> nn.Module:
        """Wraps a model for training, with the weights of rank 0 on every rank. Build the optimizer afterwards.

        Args:
            model: Model on the device of this process.
            sharded: Whether to shard it by FSDP2, in place, instead of wrapping it in DistributedDataParallel.

        Returns:
            The wrapped model; on a single process, the model itself.

        Raises:
            InputError: If the model has no parameter with requires_grad=True.
        """
        if self.size == 1:
            return model
        if not any(p.requires_grad for p in model.parameters()):
            raise InputError("the model has no parameter with requires_grad=True")
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

    # Agreement between ranks

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in order of rank. The value must be picklable."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raises an InputError on every rank if a value differs between ranks."""
        gathered = self.all_gather(dict(values))
        for rank, on_rank in enumerate(gathered):
            for name, value in on_rank.items():
                if value != gathered[0][name]:
                    shown = f": {value}, but {gathered[0][name]} on rank 0" if len(str(value)) < 40 else ""
                    raise self.report_once(InputError(f"rank {rank} of {self.size} has another {name}{shown}"))

    def local_device(self, name: str) -> torch.device:
        """Returns the device of this rank for the device that a config names."""
        return local_device(name, local_rank(self.rank), local_size(self.rank))

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raises on every rank if the body raises on one. The body must not use collectives."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            problem = error
        problems = self.all_gather(None if problem is None else one_line(problem))
        failed = next((rank for rank, text in enumerate(problems) if text is not None), None)
        if failed is None:
            return
        if failed == self.rank and problem is not None:
            raise self.raised_by_all(problem)
        raise self.raised_by_all(
            OtherProcess(f"process {failed} of {self.size} failed: {problems[failed]}")
        ) from problem

    def raised_by_all(self, error: BaseException) -> BaseException:
        """Marks an error that every rank raises at the same place, so that no rank has to be notified."""
        self._raised_by_all = error
        return error

    def report_once(self, error: Exception) -> BaseException:
        """Marks an error that every rank raises at the same place; rank 0 reports it."""
        other = OtherProcess(f"process 0 of {self.size} failed: {one_line(error)}")
        return self.raised_by_all(error if self.first else other)

    # Failures

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """Ends all ranks when one of them fails: each learns why, and none waits for one that is gone."""
        try:
            yield
        except BaseException as error:
            if self.size == 1 or self._reported or error is self._raised_by_all:
                raise
            cause = self._report(error)
            if cause is error:
                raise
            raise cause from error

    def raise_if_failed(self) -> None:
        """Raises KeyboardInterrupt if another rank has reported a failure: collectives would wait for it."""
        if self._store is not None and self._store.check([_FAILED]):
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def handle_sigterm(self) -> Iterator[None]:
        """Stops training at SIGTERM, which torchrun sends when it is stopped and when a rank has failed."""
        with stop_signals(signal.SIGTERM, ignore=lambda: self._reported and not self._destroyed):
            yield

    def destroy(self) -> None:
        """Destroys the process group: what follows runs on this rank alone."""
        self._reported = self._destroyed = True
        destroy_process_group()

    def _report(self, error: BaseException) -> BaseException:
        """Tells other ranks what failed, unless one of them was faster, and returns the error to raise on this rank."""
        self._reported = True
        outcome = "lost" if _is_collective_error(error) else "failed" if isinstance(error, Exception) else "stopped"
        report = own = f"{self.rank} {outcome} {one_line(error)}"
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may be gone with the process that held it
                report = self._store.compare_set(_FAILED, "", own).decode()
        destroy_process_group(abort=True)
        rank, outcome, text = report.split(" ", 2)
        if outcome == "lost":
            text = f"one of the {self.size} processes is gone (killed, or its machine is): start the same command again to continue"
            return RankLost(text) if report == own else OtherProcess(text, resumable=True)
        if outcome == "stopped":
            text = f"process {rank} of {self.size} was interrupted: start the same command again to continue"
            return OtherProcess(text, resumable=True) if isinstance(error, Exception) else error
        return error if report == own else OtherProcess(f"process {rank} of {self.size} failed: {text}")


_current: Processes | None = None


def alone(device: str = "cpu") -> Processes:
    """Returns rank 0 of 1."""
    return Processes(0, 1, torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu"))


def these_processes() -> Processes:
    """Returns the processes of the current process group; without one, this process alone."""
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
    """Context in which the processes that torchrun started form a process group; without torchrun, this process alone.

    A process group that exists already is used and left unchanged.

    Args:
        device: "cpu", "cuda" (one GPU per process of a machine) or "auto".
        wait: Timeout in seconds for the other processes to join.

    Yields:
        This process among the others.

    Raises:
        InputError: If torchrun's environment variables are invalid, the processes cannot reach each other, or there are
            fewer GPUs than processes.

    Example:
        >>> with many_processes("cpu") as processes:
        ...     wrapped = processes.wrap(model.to(processes.device))
    """
    global _current
    initialized = dist.is_available() and dist.is_initialized()
    with rank0_only():
        if initialized:
            processes = these_processes()
        else:
            processes = alone(device) if world_size() == 1 else Processes(*init_process_group(device, wait))
    if initialized or processes.size == 1:
        yield processes
        return
    _current = processes
    try:
        with processes.ending_together(), processes.handle_sigterm():
            yield processes
    finally:
        _current = None
        destroy_process_group()


@contextlib.contextmanager
def rank0_only() -> Iterator[None]:
    """Reports errors that occur on every rank before there is a process group on the first rank of each machine only."""
    try:
        yield
    except ExciteError as error:
        if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise OtherProcess(one_line(error)) from error


def _is_collective_error(error: BaseException) -> bool:
    """Whether a collective failed, because another rank is gone."""
    phrases = ("gloo", "NCCL", "ncclComm", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(phrase in str(error) for phrase in phrases)
    )


def _shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Applies FSDP2 to every child that has parameters, to blocks inside containers one by one, then to the model."""
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
