"""Several processes (torch.distributed): rank and world size, rows and flags of all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

_GRACE = 0.05  # seconds for the threads of gloo to finish
_same: ContextVar[bool] = ContextVar("same_batch", default=False)


def rank_and_size() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def let_go() -> None:
    """Waits a moment before the processes separate.

    The threads of gloo need Python's lock to give back the tensors of the last exchange; torch waits for them with that lock held when
    it takes apart a model in DistributedDataParallel, for ever (pytorch/pytorch#56297). After a moment without it they are done.
    """
    if rank_and_size()[1] > 1:
        time.sleep(_GRACE)


@contextmanager
def same_batch(same: bool) -> Iterator[None]:
    """With `same`, every process has the whole batch: `gathered` returns its rows once."""
    token = _same.set(same)
    try:
        yield
    finally:
        _same.reset(token)


def gathered(rows: Tensor) -> Tensor:
    """The rows (B, ...) of all processes, in their order; B may differ. Every process has to call this."""
    if _same.get() or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    counts = [torch.zeros((), dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(len(rows), device=rows.device))
    numbers = [int(count) for count in counts]
    padded = rows.new_zeros((max(numbers), *rows.shape[1:]))
    padded[: len(rows)] = rows
    shards = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(shards, padded)
    return torch.cat([shard[:number] for shard, number in zip(shards, numbers)])


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has, detached; it shares memory with the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def anyone(true: bool, device: torch.device) -> bool:
    """Whether it is true in any process. Every process has to call this."""
    flag = torch.tensor(int(true), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
