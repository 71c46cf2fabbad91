"""What the callbacks share: a watch that starts with the first training batch and ends with the training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.calls import Batch
from excite._core.distributed import rank_and_size
from excite.monitor.watch import Watch, watch
from excite.monitor.writer import Sink
from excite.runs import Run

_MOST = 256  # samples of the first batch that serve as the example


class Following:
    """Holds the arguments of `excite.watch` until there is a model to watch, then the watch itself."""

    def __init__(self, run: str | os.PathLike[str] | None, options: dict[str, Any]):
        self.folder, self.options = None if run is None else Path(run), options
        self.watch: Watch | None = None
        self._state: dict[str, Any] | None = None  # of a checkpoint, until the watch starts
        self._final: dict[str, Any] = {}  # where the last training ended
        self._run: Run | None = None
        self._losses: list[Tensor] = []

    def start(
        self, model: nn.Module, example: Batch, optimizer: Any, fallback: str | os.PathLike[str], sinks: list[Sink]
    ) -> Watch:
        """Attach to the model. After a restart from a checkpoint the run of the callback is continued."""
        folder = self.folder or unused(Path(fallback) / "excite")
        options = {"example": example, **self.options}
        if options.get("sinks") is None:
            options["sinks"] = sinks
        resumed = self._state is not None and (folder / "run.json").exists()
        if resumed and rank_and_size()[0] == 0:
            self._run = Run.open(folder, "a")
            self._run.set_status("running")
            self._run.rewind(int(self._state["steps"]))  # type: ignore[index]
        where = None if resumed and self._run is None else self._run or folder
        self.watch = watch(model, run=where, optimizer=plain_optimizer(optimizer), **options)
        if self._state is not None:
            self.watch.load_state_dict(self._state)
            self._state = None
        return self.watch

    def add(self, loss: Tensor) -> None:
        """One part of the step's loss."""
        self._losses.append(loss.detach())

    def step(self) -> None:
        """One optimizer step is done; its loss is the sum of the parts since the last one."""
        losses, self._losses = self._losses, []
        if self.watch is not None:
            self.watch.step(torch.stack([one.float().reshape(()) for one in losses]).sum() if losses else None)

    def end(self, error: BaseException | None = None) -> None:
        """Detach and close the run. Ending twice does nothing."""
        following, self.watch = self.watch, None
        run, self._run = self._run, None
        if following is not None:
            kind = None if error is None else type(error)
            try:
                self._final = following.state_dict()
            finally:
                self._finish(following, run, kind, error)

    def _finish(self, following: Watch, run: Run | None, kind: Any, error: BaseException | None) -> None:
        try:
            following.__exit__(kind, error, None if error is None else error.__traceback__)
        finally:
            if run is not None:
                run.__exit__(kind, error, None)

    def state_dict(self) -> dict[str, Any]:
        if self.watch is not None:
            return self.watch.state_dict()
        return self._state or self._final

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state) or None


def few(batch: Any) -> Any:
    """The first samples of a batch."""
    return tree_map(
        lambda leaf: leaf[:_MOST].detach().clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
    )


def plain_optimizer(given: Any) -> torch.optim.Optimizer | None:
    """Without the wrappers of Lightning and Accelerate, whose hooks do not fire."""
    while given is not None and not isinstance(given, list) and hasattr(given, "optimizer"):
        given = given.optimizer
    return given if isinstance(given, torch.optim.Optimizer) else None


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, … that is not there yet."""
    number, name = 1, folder
    while name.exists():
        number += 1
        name = folder.with_name(f"{folder.name}-{number}")
    return name
