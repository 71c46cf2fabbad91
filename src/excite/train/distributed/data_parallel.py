"""One training on several processes: the loop of one process, on a part of every batch.

The order of points, the global batch, the loss, the metrics and the checkpoints are those of one process, up to the order
in which sums are rounded. Each process takes a part of every batch; where the parts differ in size by one, its loss counts
by its number of samples, so that the gradient is that of the mean over the whole batch. A batch of fewer samples than there
are processes is done by all of them, whole.

Not the same as on one process: batch normalization takes the statistics of each process's own part (the running ones are
those of the first process), and dropout and random starts are drawn by each process for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from excite._core.randomness import capture, reseed, restore, stream
from excite._core.wrappers import is_sharded, is_shared, resharded, unwrap
from excite.errors import InputError, ModelError, TrainingStopped
from excite.train.distributed.full_state import local, same_buffers, sharded_like, sharded_optimizer, spread, whole
from excite.train.distributed.processes import Lost, OtherProcess, Processes
from excite.train.predictions import correct, spread_evenly
from excite.train.step import Loss, Step
from excite.train.trainer import Training, record_end

_BATCH = 1000  # points whose labels are compared at once, by all processes together
_CPU = torch.device("cpu")


def part_of(rows: Tensor, rank: int, size: int) -> tuple[Tensor, float]:
    """The rows of one process and the weight of their mean: over all processes, weights times means average to the mean.

    Parts follow each other and differ by at most one row. Fewer rows than processes: all of them, in every process.
    """
    if len(rows) < size:
        return rows, 1.0
    part = rows.tensor_split(size)[rank]
    return part, size * len(part) / len(rows)


@dataclass(eq=False)
class SharedStep(Step):
    """A step of all processes: returns the loss of the whole batch. `weight` is that of this process's part of it."""

    model: nn.Module = field(kw_only=True)
    size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight = 1.0
        self.why_not = "trained by several processes"
        self._begun = False

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        if loss.numel() != 1 or not loss.requires_grad:
            raise InputError(f"expected a loss of one number with a gradient; got shape {tuple(loss.shape)}")
        total = loss.detach().reshape(()) * (self.weight / self.size)
        summed = dist.all_reduce(total, async_op=True)  # while the gradients are computed
        (loss * self.weight).backward()  # gradients are averaged over processes
        if summed is not None:
            summed.wait()
        if not self._begun:
            self._begun = True
            self._check_reached(self.model)
        self.check(total)
        self.optimizer.step()
        same_buffers(self.model)
        return total

    def _check_reached(self, model: nn.Module) -> None:
        """DistributedDataParallel waits for the gradient of every parameter."""
        idle = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if idle and not is_sharded(model):
            raise ModelError(
                f"parameter {idle[0]!r} has no influence on the loss, and the processes would wait for its gradient: "
                "set its requires_grad to False, or train on one process"
            )


class SharedTraining(Training):
    """A training of which every process has this object; only the first one has the run."""

    def __init__(self, here: Processes, model: nn.Module, *rest: Any):
        if not is_shared(model):
            raise InputError(
                f"{here.size} processes are here, but the model is for one: wrap it first, as in "
                "many_processes().wrap(model), or in DistributedDataParallel or fully_shard"
            )
        super().__init__(unwrap(model), *rest)
        self.here, self.processes, self.capture = here, here.size, False
        self._common: dict[str, Any] = {}  # the random stream that all processes have in common

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        try:
            with super().ending(), self.here.ending_together():
                yield
        except (Lost, OtherProcess) as error:
            if error.lost:
                record_end(self.run, "stopped", str(error))
            raise

    def make_step(self, loss: Loss, optimizer: torch.optim.Optimizer, networks: int = 1) -> Step:
        self._step = SharedStep(loss, optimizer, networks=networks, model=self.model, size=self.here.size)
        return self._step

    def begin(self) -> None:
        self.kept = any(self.here.everyone(self.run is not None))
        self._common = capture(_CPU)
        reseed(stream(self.settings["seed"], 0, 1 + self.here.rank), self.device)
        super().begin()

    def batch(self, at: Tensor) -> tuple[Tensor, Tensor]:
        mine, self._step.weight = part_of(at, self.here.rank, self.here.size)
        if self.transform is None:
            return self.x[mine], self.y[mine]
        # Of the whole batch, from the common stream: the points are augmented as on one process.
        own = capture(_CPU)
        restore(self._common, _CPU)
        x = self.transform(self.x[at])
        self._common = capture(_CPU)
        restore(own, _CPU)
        return part_of(x, self.here.rank, self.here.size)[0], self.y[mine]

    # Inside

    def _settle(self) -> None:
        try:
            super()._settle()
        except TrainingStopped as error:  # the loss is that of the whole batch: all processes are here
            raise self.here.as_one(error) from None

    @torch.no_grad()
    def _accuracy(self, x: Tensor, y: Tensor, most: int | None = None) -> float:
        x, y = spread_evenly(x, y, most)
        right = 0
        with resharded(self.model):
            for points, labels in zip(x.split(_BATCH), y.split(_BATCH)):
                mine, _ = part_of(torch.arange(len(points)), self.here.rank, self.here.size)
                count = correct(self.model, self.predict, points[mine], labels[mine])
                right += count if len(points) >= self.here.size or self.here.first else 0
        total = torch.tensor(right, device=self.device)
        dist.all_reduce(total)
        return int(total) / len(x)

    def _finite(self) -> bool:
        good = torch.stack([torch.isfinite(local(p)).all() for p in self.model.parameters()]).all().int()
        dist.all_reduce(good, dist.ReduceOp.MIN)
        return bool(good)

    # Checkpoints

    def _checkpoint(self, final: bool = False) -> None:
        if not self.kept:
            return
        self._settle()
        if not self._finite():
            raise self.here.as_one(self._not_finite())
        state = whole(self._state(), keep=self.here.first)
        streams = self.here.everyone(state["random"])
        state["random"] = {**self._common, "cuda": state["random"]["cuda"]}  # what one process would go on with
        with self.here.agreeing():
            if self.run is not None:
                self._save({**state, "streams": streams}, final)

    def _read(self) -> tuple[int, dict[str, Any]] | None:
        with self.here.agreeing():
            found = super()._read()
        known: tuple[int, dict[str, Any]] | None
        known = spread(self.here, None if found is None else list(found))
        return known

    def _restore(self, step: int, state: dict[str, Any]) -> None:
        if is_sharded(self.model):
            state["model"] = sharded_like(self.model.state_dict(), state["model"])
            state["optimizer"] = sharded_optimizer(self.optimizer, state["optimizer"])
            probes = {probe.name: probe.state_dict() for probe in getattr(self.watch, "probes", ())}
            state["watch"] = sharded_like({"probes": probes}, state["watch"])
        super()._restore(step, state)
        self._common = capture(_CPU)
        streams = state.get("streams", ())
        if len(streams) == self.here.size:
            restore(streams[self.here.rank], self.device)
        else:  # made by another number of processes
            reseed(stream(self.settings["seed"], 0, 1 + self.here.rank, step), self.device)
