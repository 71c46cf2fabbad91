"""Shared by the integrations: a watch that is attached once there is a model and a batch, and closed with the training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.calls import Batch
from excite._core.distributed import rank_and_size
from excite._core.warn import warn_user
from excite.errors import ExciteError, InputError
from excite.monitor.logged import is_loggable, is_owned
from excite.monitor.points import check_inputs, draw_parts
from excite.monitor.watch import Watch, watch
from excite.monitor.writer import Sink
from excite.runs import Run
from excite.runs.checks import is_name

_OTHER = object()  # what is not JSON
_DEEPEST = 8  # levels of a setting
_MAX_EXAMPLE = 256  # samples of the first batch that serve as the example


class DeferredWatch:
    """Holds the arguments of `excite.watch` until there is a model, then the watch itself.

    Args:
        run: Folder of the run; None for `excite` in the folder passed to `start`.
        options: Keyword arguments of `excite.watch`.
    """

    def __init__(self, run: str | os.PathLike[str] | None, options: dict[str, Any]):
        self.folder, self.options = None if run is None else Path(run), options
        self.watch: Watch | None = None
        self._state: dict[str, Any] | None = None  # of a checkpoint, until the watch starts
        self._final: dict[str, Any] = {}  # where the last training ended
        self._run: Run | None = None
        self._losses: list[Tensor] = []

    def start(
        self,
        model: nn.Module,
        example: Batch | None,
        optimizer: Any,
        fallback: str | os.PathLike[str],
        sinks: list[Sink],
        data: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Watch:
        """Attaches to the model; continues the existing run after `load_state_dict`.

        Args:
            model: The model.
            example: A batch on which layers are measured.
            optimizer: The optimizer, also wrapped.
            fallback: Folder in which the run is created if none was given.
            sinks: Sinks of the framework.
            data: The framework's data, "train" and "test", whose margins are measured unless the user chose data or probes.
            config: The framework's settings, of which plain values are stored in a new run unless the user passed a config.
        """
        folder = self.folder or unused_folder(Path(fallback) / "excite")
        options = {"example": example, **self._with_data(model, data or {})}
        if options.get("sinks") is None:
            options["sinks"] = sinks
        resumed = self._state is not None and (folder / "run.json").exists()
        if resumed and rank_and_size()[0] == 0:
            self._run = Run.open(folder, "a")
            self._run.set_status("running")
            self._run.rewind(int(self._state["steps"]))  # type: ignore[index]
        where = None if resumed and self._run is None else self._run or folder
        if not resumed and "config" not in options and (plain := plain_values(config or {})):
            options["config"] = plain
        self.watch = watch(model, run=where, optimizer=unwrap_optimizer(optimizer), **options)
        if self._state is not None:
            self.watch.load_state_dict(self._state)
            self._state = None
        return self.watch

    def _with_data(self, model: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
        """The options, with points drawn from the framework's data; a warning says why there are none."""
        options = dict(self.options)
        if options.get("probes") is not None or "train" in options or "test" in options:
            return options
        try:
            drawn = draw_parts(data.get("train"), data.get("test"))
            check_inputs(drawn, model)
            tokens = [split for split, points in drawn.items() if not points.x.is_floating_point()]
            if tokens:
                raise InputError(
                    f"{tokens[0]}: inputs are whole numbers such as token ids, which cannot be changed a little"
                )
        except ExciteError as error:
            warn_user(f"margins of the training and test data are not measured: {error}")
            return {name: value for name, value in options.items() if name not in ("normalize", "bounds", "threshold")}
        return options | drawn

    def add(self, loss: Tensor) -> None:
        """Adds the loss of one micro-batch of the current step."""
        self._losses.append(loss.detach())

    def step(self) -> None:
        """Records one optimizer step; its loss is the sum of the losses added since the previous one."""
        losses, self._losses = self._losses, []
        if self.watch is not None:
            self.watch.step(torch.stack([loss.float().reshape(()) for loss in losses]).sum() if losses else None)

    def log(self, values: Mapping[str, Any], framework: str) -> None:
        """Records what the framework logs, under its names; one that belongs to a probe gets the framework's name in front.

        Values that are not numbers, such as text, are left out: the framework's own loggers have it.
        """
        if self.watch is None:
            return
        named = {f"{framework}/{name}" if is_owned(name, self.watch.probes) else name: v for name, v in values.items()}
        self.watch.log_to_run({name: v for name, v in named.items() if is_name(name) and is_loggable(v)})

    def end(self, error: BaseException | None = None) -> None:
        """Detaches and closes the run; a second call does nothing."""
        active, self.watch = self.watch, None
        run, self._run = self._run, None
        if active is not None:
            error_type = None if error is None else type(error)
            try:
                self._final = active.state_dict()
            finally:
                self._finish(active, run, error_type, error)

    def _finish(self, active: Watch, run: Run | None, error_type: Any, error: BaseException | None) -> None:
        try:
            active.__exit__(error_type, error, None if error is None else error.__traceback__)
        finally:
            if run is not None:
                run.__exit__(error_type, error, None)

    def state_dict(self) -> dict[str, Any]:
        """State of the watch for a checkpoint."""
        if self.watch is not None:
            return self.watch.state_dict()
        return self._state or self._final

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint: applied when the watch starts."""
        self._state = dict(state) or None


def plain_values(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings whose values are JSON: numbers, text, None, and lists and dicts of these; others are left out."""
    return {str(name): value for name, setting in settings.items() if (value := _plain(setting)) is not _OTHER}


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Enum):
        value = value.value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth == _DEEPEST:
        return _OTHER
    if isinstance(value, list | tuple):
        members = [_plain(item, depth + 1) for item in value]
        return _OTHER if any(member is _OTHER for member in members) else members
    if isinstance(value, Mapping):
        named = {str(name): _plain(member, depth + 1) for name, member in value.items()}
        return {name: member for name, member in named.items() if member is not _OTHER}
    return _OTHER


def first_samples(batch: Any) -> Any:
    """The first samples of a batch, detached copies."""
    return tree_map(
        lambda leaf: leaf[:_MAX_EXAMPLE].detach().clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
    )


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer inside the wrappers of Lightning and Accelerate, whose hooks do not fire."""
    while optimizer is not None and not isinstance(optimizer, list) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def unused_folder(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, … that does not exist."""
    number, name = 1, folder
    while name.exists():
        number += 1
        name = folder.with_name(f"{folder.name}-{number}")
    return name
