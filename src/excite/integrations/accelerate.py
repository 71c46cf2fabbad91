"""Accelerate: monitoring of a training loop that an `Accelerator` drives.

monitor = AcceleratedWatch(accelerator, model, example=x, run="runs/first", optimizer=optimizer)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from excite._core.calls import Batch
from excite._core.checks import need
from excite._core.wrappers import unwrap
from excite.errors import InputError
from excite.integrations.callback import DeferredWatch
from excite.monitor.sinks import TensorBoard, WandB
from excite.monitor.watch import Watch
from excite.monitor.writer import Sink


class AcceleratedWatch:
    """`excite.watch` for a loop with `accelerate.Accelerator`.

    The model and the optimizer may be those that `accelerator.prepare` returned. Call `step` after every batch: an
    optimizer step is counted when the accelerator synchronizes gradients, and its loss is the sum of the scaled losses of
    the accumulated batches, as `accelerator.backward` scales them. The state of the probes is part of
    `accelerator.save_state`; after `accelerator.load_state` the run continues at the step of the checkpoint.

    Args:
        accelerator: The `accelerate.Accelerator` of the training.
        model: The model being trained, prepared or not.
        run: Folder of the run; by default `excite` in the accelerator's project folder.
        example: A fixed batch on which layers are measured; see `excite.watch`.
        optimizer: The optimizer, prepared or not.
        **options: Other keyword arguments of `excite.watch`. `sinks` defaults to the accelerator's trackers, where these
            are TensorBoard or Weights & Biases.

    Raises:
        InputError: If `accelerator` is not an `Accelerator`.

    Example:
        >>> with AcceleratedWatch(accelerator, model, "runs/first", x, optimizer) as monitor:  # doctest: +SKIP
        ...     for x, y in loader:
        ...         with accelerator.accumulate(model):
        ...             loss = criterion(model(x), y)
        ...             accelerator.backward(loss)
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...         monitor.step(loss)
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        run: str | os.PathLike[str] | None = None,
        example: Batch | None = None,
        optimizer: Any = None,
        **options: Any,
    ):
        if not isinstance(accelerator, need("accelerate", "transformers").Accelerator):
            raise InputError(f"AcceleratedWatch: expected an accelerate.Accelerator; got {type(accelerator).__name__}")
        self._accelerator, self._model, self._example, self._optimizer = accelerator, model, example, optimizer
        self._deferred = DeferredWatch(run, options)
        accelerator.register_for_checkpointing(self)

    @property
    def watch(self) -> Watch | None:
        """The `Watch`, or None before `start` and after `close`."""
        return self._deferred.watch

    def start(self) -> None:
        """Attaches to the model. Entering the context or the first `step` does the same."""
        if self._deferred.watch is None:
            folder = self._accelerator.project_dir or "runs"
            sinks = _sinks(self._accelerator) if self._accelerator.is_main_process else []
            self._deferred.start(unwrap(self._model), self._example, self._optimizer, folder, sinks)

    def step(self, loss: Tensor | None = None) -> None:
        """Call after every batch with its unscaled loss; counts a step where gradients were synchronized."""
        self.start()
        if loss is not None:
            self._deferred.add(loss / self._accelerator.gradient_accumulation_steps)
        if self._accelerator.sync_gradients:
            self._deferred.step()

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Records values of the training at the current step, as `Watch.log` does.

        Args:
            values: Numbers by name.
            **named: Numbers whose names are identifiers.
        """
        self.start()
        assert self._deferred.watch is not None
        self._deferred.watch.log(values, **named)

    def close(self) -> None:
        """Detaches from the model and closes the run; a second call does nothing."""
        self._deferred.end()

    def state_dict(self) -> dict[str, Any]:
        """State for `accelerator.save_state`."""
        return self._deferred.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by `accelerator.load_state`, which has to come before the context is entered."""
        if self._deferred.watch is not None:
            raise InputError(
                "AcceleratedWatch: call accelerator.load_state before entering the context or the first step"
            )
        self._deferred.load_state_dict(state)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deferred.end(error)


def _sinks(accelerator: Any) -> list[Sink]:
    """Sinks for the trackers that the accelerator logs to."""
    sinks: list[Sink] = []
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            sinks.append(TensorBoard(writer=tracker.tracker))
        elif tracker.name == "wandb":
            sinks.append(WandB(run=tracker.tracker))
    return sinks
