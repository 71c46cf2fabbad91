"""Data-parallel training: the loop of one process, on a part of every batch on each rank.

The order of the points, the global batch, the loss, the metrics and the checkpoints are those of one process, up to the
order in which sums are rounded. Each rank takes a part of every batch. Parts differ in size by at most one sample, and each
rank's loss is weighted by its number of samples, so that the gradient is that of the mean over the global batch. A batch with
fewer samples than ranks is processed in full by every rank.

Different from one process: batch normalization uses the statistics of each rank's part (the running statistics are those of
rank 0), and dropout and random starts are drawn by each rank for itself.

A stop that is requested on one rank (SIGTERM, Ctrl-C) stops all ranks at the same step, with a checkpoint: the request travels
with the loss, which is summed over ranks anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from excite._core.distributed import local_shard, same_batch
from excite._core.randomness import capture, reseed, restore, stream
from excite._core.wrappers import is_sharded, is_shared, resharded, unwrap
from excite.errors import InputError, ModelError, TrainingStopped
from excite.train.distributed.full_state import (
    broadcast_buffers,
    broadcast_state,
    full_state,
    shard_like,
    shard_optimizer_state,
)
from excite.train.distributed.processes import OtherProcess, Processes, RankLost
from excite.train.predictions import correct, spread_evenly
from excite.train.settings import TrainerSettings, TrainingData
from excite.train.step import Loss, Step
from excite.train.trainer import Trainer, record_end

_BATCH = 1000  # points whose labels are compared at once, over all ranks
_CPU = torch.device("cpu")


def part_of(rows: Tensor, rank: int, size: int) -> tuple[Tensor, float]:
    """Returns the rows of one rank and the weight of their mean.

    Parts are contiguous and differ by at most one row. The average over ranks of weight times mean is the mean over all rows.
    With fewer rows than ranks, every rank gets all rows.

    Args:
        rows: Rows of the global batch.
        rank: Rank of the process.
        size: Number of processes.

    Returns:
        The rows of this rank, and their weight.
    """
    if len(rows) < size:
        return rows, 1.0
    local_rows = rows.tensor_split(size)[rank]
    return local_rows, size * len(local_rows) / len(rows)


@dataclass(eq=False)
class DataParallelStep(Step):
    """A step of all ranks; returns the loss of the global batch.

    `weight` is the weight of this rank's part of the batch; `same` is True where every rank has the whole batch. `total` holds the loss of the global batch and the number of ranks that
    voted to stop.
    """

    model: nn.Module = field(kw_only=True)
    size: int = field(kw_only=True)
    vote: Callable[[], bool] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight, self.same = 1.0, False
        self.total = torch.zeros(2)
        self.why_not = "trained by several processes"
        self._begun = False

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Does one training step on this process's part of the batch, and returns the loss over the whole batch."""
        self.optimizer.zero_grad()
        with same_batch(self.same):
            loss = self.loss(x, y)
        if loss.numel() != 1 or not loss.requires_grad:
            raise InputError(f"expected a loss of one number with a gradient; got shape {tuple(loss.shape)}")
        value = loss.detach().reshape(()) * (self.weight / self.size)
        self.total = torch.stack([value, torch.full_like(value, float(self.vote()))])
        summed = dist.all_reduce(self.total, async_op=True)  # while the gradients are computed
        (loss * self.weight).backward()  # gradients are averaged over ranks
        if summed is not None:
            summed.wait()
        if not self._begun:
            self._begun = True
            self._check_gradients(self.model)
        self.check(self.total[0])
        self.optimizer.step()
        broadcast_buffers(self.model)
        return self.total[0]

    def _check_gradients(self, model: nn.Module) -> None:
        """DistributedDataParallel waits for the gradient of every parameter."""
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if unused and not is_sharded(model):
            raise ModelError(
                f"parameter {unused[0]!r} has no influence on the loss, and the processes would wait for its gradient: "
                "set its requires_grad to False, or train on one process"
            )


class DataParallelTrainer(Trainer):
    """The trainer of one rank. Every rank has one; only that of rank 0 has the run."""

    def __init__(
        self,
        model: nn.Module,
        data: TrainingData,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        settings: TrainerSettings,
        ranks: Processes,
    ) -> None:
        if not is_shared(model):
            raise InputError(
                f"world_size is {ranks.size}, but the model is not distributed: wrap it first, as in "
                "many_processes().wrap(model), or in DistributedDataParallel or fully_shard"
            )
        super().__init__(unwrap(model), data, loss, optimizer, settings)
        self.ranks, self.processes = ranks, ranks.size
        self._common: dict[str, Any] = {}  # the random stream that all ranks have in common
        self._stop_agreed = False  # at least one rank voted to stop, and all ranks know it

    @contextlib.contextmanager
    def record_failure(self) -> Iterator[None]:
        """Records in the run why a training ended early, and ends all ranks."""
        try:
            with super().record_failure(), self.ranks.ending_together():
                yield
        except (RankLost, OtherProcess) as error:
            if error.resumable:
                record_end(self.run, "stopped", str(error))
            raise

    def make_step(self, loss: Loss, optimizer: torch.optim.Optimizer, networks: int = 1) -> Step:
        """Builds the step of this rank."""
        self._step = DataParallelStep(
            loss, optimizer, networks=networks, model=self.model, size=self.ranks.size, vote=self._vote
        )
        return self._step

    def begin(self) -> None:
        """Seeds the random stream of this rank and resumes from the last checkpoint."""
        self.has_run = any(self.ranks.all_gather(self.run is not None))
        self._common = capture(_CPU)
        reseed(stream(self.settings.seed, 0, 1 + self.ranks.rank), self.device)
        super().begin()

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of a batch."""
        local_rows, self._step.weight = part_of(indices, self.ranks.rank, self.ranks.size)
        self._step.same = len(indices) < self.ranks.size
        if self.settings.transform is None:
            return self.x[local_rows], self.y[local_rows]
        # Of the global batch, from the common stream: the points are augmented as on one process.
        own = capture(_CPU)
        restore(self._common, _CPU)
        x = self.settings.transform(self.x[indices])
        self._common = capture(_CPU)
        restore(own, _CPU)
        return part_of(x, self.ranks.rank, self.ranks.size)[0], self.y[local_rows]

    # Stopping

    @property
    def stop_requested(self) -> bool:
        """Whether a rank has requested a stop, and all ranks know it."""
        return self._stop_agreed

    def checkpoint_now(self) -> None:
        """Writes a checkpoint of this step, unless it exists; on all ranks."""
        if self.has_run and not any(self.ranks.all_gather(self._has_checkpoint())):
            self._checkpoint()

    def interrupt(self) -> BaseException:
        """Returns the exception that all ranks raise after a requested stop."""
        return self.ranks.raised_by_all(super().interrupt())

    def _vote(self) -> bool:
        """Whether this rank votes to stop."""
        if not super().stop_requested:
            return False
        self.ranks.raise_if_failed()  # torchrun sends SIGTERM also when another rank has failed
        return True

    # Metrics

    def _record(self, loss: Tensor) -> None:
        super()._record(self._step.total)

    def _fetch(self, pending: Sequence[Tensor]) -> list[float]:
        rows: list[list[float]] = torch.stack(list(pending)).tolist()
        self._stop_agreed |= any(votes > 0 for _, votes in rows)
        return [loss for loss, _ in rows]

    def _drain(self) -> None:
        try:
            super()._drain()
        except TrainingStopped as error:  # the loss is that of the global batch: all ranks raise
            raise self.ranks.report_once(error) from None

    @torch.no_grad()
    def _accuracy(self, x: Tensor, y: Tensor, max_points: int | None = None) -> float:
        x, y = spread_evenly(x, y, max_points)
        num_correct = 0
        with resharded(self.model):
            for points, labels in zip(x.split(_BATCH), y.split(_BATCH)):
                local_rows, _ = part_of(torch.arange(len(points)), self.ranks.rank, self.ranks.size)
                count = correct(self.model, self.predict, points[local_rows], labels[local_rows])
                num_correct += count if len(points) >= self.ranks.size or self.ranks.first else 0
        total = torch.tensor(num_correct, device=self.device)
        dist.all_reduce(total)
        return int(total) / len(x)

    def _finite(self) -> bool:
        finite = torch.stack([torch.isfinite(local_shard(p)).all() for p in self.model.parameters()]).all().int()
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        return bool(finite)

    # Checkpoints

    def _checkpoint(self, final: bool = False) -> None:
        if not self.has_run:
            return
        self._drain()
        if not self._finite():
            raise self.ranks.report_once(self._not_finite())
        state = full_state(self._state(), on_this_rank=self.ranks.first)
        streams = self.ranks.all_gather(state["random"])
        state["random"] = {**self._common, "cuda": state["random"]["cuda"]}  # what one process would continue with
        with self.ranks.raise_together():
            if self.run is not None:
                self._save({**state, "streams": streams}, final)

    def _read(self) -> tuple[int, dict[str, Any]] | None:
        with self.ranks.raise_together():
            checkpoint = super()._read()
        known: tuple[int, dict[str, Any]] | None
        known = broadcast_state(self.ranks, None if checkpoint is None else list(checkpoint))
        return known

    def _restore(self, step: int, state: dict[str, Any]) -> None:
        if is_sharded(self.model):
            state["model"] = shard_like(self.model.state_dict(), state["model"])
            state["optimizer"] = shard_optimizer_state(self.optimizer, state["optimizer"])
            probes = {probe.name: probe.state_dict() for probe in getattr(self.watch, "probes", ())}
            state["watch"] = shard_like({"probes": probes}, state["watch"])
        super()._restore(step, state)
        self._common = capture(_CPU)
        streams = state.get("streams", ())
        if len(streams) == self.ranks.size:
            restore(streams[self.ranks.rank], self.device)
        else:  # made by another number of processes
            reseed(stream(self.settings.seed, 0, 1 + self.ranks.rank, step), self.device)
