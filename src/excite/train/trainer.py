"""The trainer of one model. Continues by itself from the run's last checkpoint.

On the CPU, with the same number of threads, a training that was killed and continued ends with the same bits in its
weights and its metrics as one that was not.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.checks import check_model, shown
from excite._core.preserve import device_of
from excite._core.randomness import capture, restore
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, RunError, TrainingStopped, one_line
from excite.runs.import_paths import ModelSource
from excite.runs.metrics import Busy
from excite.runs.run import Run
from excite.runs.weights import full_state
from excite.train.batches import Shuffle
from excite.train.cuda_graph import CapturedStep
from excite.train.loop import run_loop
from excite.train.predictions import accuracy, decisions
from excite.train.settings import (
    Saved,
    TrainerSettings,
    TrainingData,
    TrainingResult,
    check_points,
    parse_every,
)
from excite.train.step import Loss, Step
from excite.train.stopping import stop_requested

_MAX_PENDING = 32  # steps whose losses may wait on a GPU before they are fetched and checked
_PATIENCE, _FINAL_TRIES = 5.0, 60  # seconds to wait for a locked database, and how often before the training ends
_MAX_POINTS = 2000  # training points for the accuracy after each epoch


class Trainer:
    """Trains one model: holds its progress, logs, and writes and restores checkpoints.

    `begin` resumes from the last checkpoint and `train` takes the remaining steps in `excite.train.loop.run_loop`, which
    also takes several trainers at once (`excite.train.vectorized.trainer.fit_together`).

    Args:
        model: Model to train, in place.
        data: Training and test points.
        loss: Function of a batch (x, y) that returns one number with a gradient.
        optimizer: Optimizer of the model's parameters.
        settings: Everything else.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TrainingData,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        settings: TrainerSettings,
    ) -> None:
        refuse_lazy(check_model(model))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"optimizer: expected a torch.optim.Optimizer; got {shown(optimizer)}")
        if not callable(loss):
            raise InputError(f"loss: expected a function of x and y; got {shown(loss)}")
        check_points(data)
        self.model, self.loss, self.optimizer, self.settings = model, loss, optimizer, settings
        self.run, self.excitation, self.watch = settings.run, settings.excitation, settings.watch
        self.progress = settings.progress
        self.device = device_of(model)
        self.x, self.y = data.x_train.to(self.device), data.y_train.to(self.device)
        self.test = (data.x_test.to(self.device), data.y_test.to(self.device))
        # Weights that are no longer finite are evaluated too: `decide` is `predict` without its checks.
        excitation = settings.excitation
        own = None if excitation is None else getattr(excitation, "decide", excitation.predict)
        self.predict = settings.predict or own or decisions(model)
        self.classifies = not data.y_train.is_floating_point()
        self.epochs, self.per_epoch = settings.epochs, -(-len(self.x) // settings.batch)
        self.every = parse_every(settings.checkpoint_every, self.per_epoch)
        self.shuffle = Shuffle(len(self.x), settings.batch, settings.seed)
        self.epoch, self.position, self.step = 0, 0, 0  # the next batch is number `position` of `epoch`
        self.resumed_from: int | None = None
        self.started = False
        self.interrupted = False  # by Ctrl-C in `progress`: ends after the step
        self.failure: TrainingStopped | None = None  # why this trainer cannot continue
        self.last: dict[str, float] = {}
        self.best = -math.inf  # of the value that decides which weights are stored
        self.processes = 1
        self._spent, self._since = 0.0, time.perf_counter()  # seconds of training before the last checkpoint, and now
        self._pending: list[Tensor] = []
        self._patience = _MAX_PENDING if self.device.type == "cuda" else 1

    def train(self) -> TrainingResult:
        """Takes all remaining steps, after `begin`."""
        step = self.make_step(self.loss, self.optimizer)
        step.check = self.before_update

        def update(batches: Sequence[Tensor]) -> list[Tensor]:
            (indices,) = batches
            if self.settings.schedule is not None:
                self.settings.schedule(self.step, self.epochs * self.per_epoch)
            return [step(*self.batch(indices))]

        (result,) = run_loop([self], update, step)
        return result

    @contextlib.contextmanager
    def record_failure(self) -> Iterator[None]:
        """Records in the run why a training inside the context ended early."""
        try:
            yield
        except KeyboardInterrupt:
            record_end(self.run, "stopped", "interrupted: start it again to continue")
            raise
        except RunError as error:
            record_end(self.run, "failed", one_line(error))
            if not self.started:  # the run could not be read: nothing was trained
                raise
            raise TrainingStopped(f"{error} (training stopped; {self.last_good()})") from error
        except BaseException as error:
            record_end(self.run, "failed", one_line(error))
            raise

    # Called by the loop

    def make_step(self, loss: Loss, optimizer: torch.optim.Optimizer, networks: int = 1) -> Step:
        """Builds the step, captured as a CUDA graph where possible."""
        setting = getattr(self.excitation, "setting", lambda: None)
        adapt = getattr(self.excitation, "adapt", lambda x, y: None)
        return (CapturedStep if self.settings.capture else Step)(loss, optimizer, setting, networks, adapt)

    def begin(self) -> None:
        """Resumes from the last checkpoint of the run, if it has one."""
        self._resume()
        self.started, self._since = True, time.perf_counter()
        if self.resumed_from is None:
            self._measure_accuracy()

    def open_epoch(self) -> list[Tensor]:
        """Returns the indices of the remaining batches of this epoch."""
        if self.excitation is not None:
            self.excitation.advance(self.epoch / self.epochs)
        return self.shuffle.epoch(self.device)[self.position :]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the points and labels of a batch."""
        x, transform = self.x[indices], self.settings.transform
        # Outside the step: random numbers of the CPU would be frozen into a captured one.
        return x if transform is None else transform(x), self.y[indices]

    def before_update(self, loss: Tensor) -> None:
        """On the CPU, keeps a loss that is not finite from the weights. On a GPU that would cost a synchronization."""
        if self._patience == 1:
            self._record(loss)
            self._drain()

    def after_update(self, loss: Tensor) -> None:
        """Logs the loss, calls `watch` and `progress`, and writes a checkpoint where one is due."""
        if self._patience > 1:
            self._record(loss)
            if len(self._pending) >= self._patience:
                self._drain()
        if self.watch is not None:
            self.watch.step(loss)
        if self.progress is not None:
            try:
                self.progress("training", self.step, self.epochs * self.per_epoch)
            except KeyboardInterrupt:
                self.interrupted = True
        if self.step % self.every == 0 and self.position < self.per_epoch:
            self._checkpoint()

    def raise_interrupt(self) -> None:
        """Raises KeyboardInterrupt after a training that was interrupted when it had only its end left to do."""
        if self.stop_requested:
            raise KeyboardInterrupt

    def checkpoint_now(self) -> None:
        """Writes a checkpoint of this step, unless it exists."""
        if self.run is not None and not self._has_checkpoint():
            self._checkpoint()

    def interrupt(self) -> BaseException:
        """Returns the exception that ends a training after a requested stop."""
        return KeyboardInterrupt()

    def close_epoch(self) -> None:
        """Measures accuracies at the end of an epoch."""
        self._drain()
        self._measure_accuracy(self.epoch + 1)
        getattr(self.excitation, "check_collapse", lambda: None)()
        metrics: dict[str, float] = getattr(self.excitation, "measured", dict)()
        if metrics:
            self._log(self.step, {f"excitation/{name}": value for name, value in metrics.items()})
        self.epoch, self.position = self.epoch + 1, 0
        if self.step % self.every == 0 and self.epoch < self.epochs:
            self._checkpoint()

    def finish(self, why_not_captured: str | None = None, together: int = 1) -> TrainingResult:
        """Writes the final checkpoint; `together` is the number of networks trained in the same step."""
        if self.resumed_from != self.step:
            if self.excitation is not None:
                self.excitation.advance(1.0)
            self._checkpoint(final=True)
        self.optimizer.zero_grad()
        if self.run is not None:
            self.run.flush()
            taken = {"seconds": self.seconds, "together": together, "why_not_captured": why_not_captured}
            taken |= {"processes": self.processes}
            self.run.write_json("time", {"device": _device_name(self.device), **taken})
            self.run.set_status("done")
        train, test = self.last.get("accuracy/train"), self.last.get("accuracy/test")
        return TrainingResult(self.step, self.last["loss/step"], train, test, self.resumed_from, why_not_captured)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, including those before it was resumed."""
        return self._spent + time.perf_counter() - self._since

    @property
    def stop_requested(self) -> bool:
        """Whether training should end after this step, with a checkpoint."""
        return self.interrupted or stop_requested()

    # Metrics

    def _record(self, loss: Tensor) -> None:
        self._pending.append(loss)
        self.step, self.position = self.step + 1, self.position + 1

    def _drain(self) -> None:
        """Fetches, logs and checks the losses of the steps since the last call."""
        if not self._pending:
            return
        values = self._fetch(self._pending)
        self._pending.clear()
        for step, value in enumerate(values, self.step - len(values) + 1):
            self._log(step, {"loss/step": value})
            if not math.isfinite(value):
                raise self._stopped(
                    f"the loss is {value} at step {step}: training stopped, {self.last_good()}; lower the learning rate "
                    "or the radius, or look at the data"
                )

    def _fetch(self, pending: Sequence[Tensor]) -> list[float]:
        """Copies recorded losses to the host, all at once."""
        values: list[float] = torch.stack([loss.reshape(()) for loss in pending]).tolist()
        return values

    def _measure_accuracy(self, epochs_done: int = 0) -> None:
        values = {} if self.settings.evaluate is None else self.settings.evaluate(epochs_done)
        if values:
            self._log(self.step, values)
            self._save_best(values)
        if not self.classifies:
            return
        values = {"accuracy/train": self._accuracy(self.x, self.y, _MAX_POINTS)}
        if len(self.test[0]):
            values["accuracy/test"] = self._accuracy(*self.test)
        self._log(self.step, values)

    def _save_best(self, values: dict[str, float]) -> None:
        """Stores the weights if the value that decides about them is larger than after all epochs before."""
        name = self.settings.save_best
        if name is None or not self.step or not values.get(name, -math.inf) > self.best:
            return
        self.best = values[name]
        if self.run is not None:
            source = ModelSource(None, {}, "the run's config says how")
            self.run.save_weights(full_state(self.model), self.step, source, best=True)

    def _accuracy(self, x: Tensor, y: Tensor, max_points: int | None = None) -> float:
        return accuracy(self.model, self.predict, x, y, max_points)

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.last.update(values)
        if self.run is not None:
            self.run.log(step, values)

    def last_good(self) -> str:
        """Names the last good checkpoint, for error messages."""
        checkpoints = self.run.checkpoints() if self.run is not None else []
        if not checkpoints:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is that of step {checkpoints[-1].step}"

    # Checkpoints

    def _checkpoint(self, final: bool = False) -> None:
        if self.run is None:
            return
        self._drain()
        # A gradient can be NaN under a finite loss; then the next loss would tell, after the last good state is gone.
        if not self._finite():
            raise self._not_finite()
        self._save(self._state(), final)

    def _has_checkpoint(self) -> bool:
        return self.run is not None and self.step in [checkpoint.step for checkpoint in self.run.checkpoints()]

    def _save(self, state: dict[str, Any], final: bool) -> None:
        """Writes a checkpoint.

        Where another process holds the metrics, which a checkpoint must not be ahead of, it is left out; the final one waits.
        """
        assert self.run is not None
        for left in reversed(range(_FINAL_TRIES if final else 1)):
            try:
                with self.run.patience(_PATIENCE):
                    self.run.save_checkpoint(self.step, state, final=final)
                return
            except Busy as error:
                if final and not left:
                    raise
                if not final:
                    warnings.warn(f"no checkpoint at step {self.step}, training continues: {error}", stacklevel=4)

    def _finite(self) -> bool:
        return bool(torch.stack([torch.isfinite(p).all() for p in self.model.parameters()]).all())

    def _not_finite(self) -> TrainingStopped:
        return self._stopped(
            f"the weights are not finite after step {self.step}: training stopped, {self.last_good()}; lower the "
            "learning rate or the radius"
        )

    def _stopped(self, message: str) -> TrainingStopped:
        self.failure = TrainingStopped(message)
        return self.failure

    def _state(self) -> dict[str, Any]:
        return {
            "settings": self._identity(),
            "progress": {"epoch": self.epoch, "position": self.position},
            "last": self.last,
            "best": self.best,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "excitation": None if self.excitation is None else self.excitation.state_dict(),
            "watch": self.watch.state_dict() if isinstance(self.watch, Saved) else None,
            "shuffle": self.shuffle.state_dict(between=self.position == 0),
            "random": capture(self.device),
        }

    def _identity(self) -> dict[str, int]:
        """Settings that must not change when a training is resumed."""
        settings = self.settings
        return {"epochs": settings.epochs, "batch": settings.batch, "seed": settings.seed, "points": len(self.x)}

    def _resume(self) -> None:
        checkpoint = self._read()
        if checkpoint is not None:
            self._restore(*checkpoint)

    def _read(self) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the last checkpoint of the run."""
        if self.run is None:
            return None
        if not self.run.checkpoints():
            if self.run.resumed:
                self.run.rewind(-1)  # killed before its first checkpoint: start over
            return None
        step, state = self.run.load_checkpoint()
        for name, value in self._identity().items():
            if state["settings"][name] != value:
                raise RunError(
                    f"{self.run.path} was made with {name} = {state['settings'][name]}, not {value}: use the same settings "
                    "to continue it, or choose another folder"
                )
        return step, state

    def _restore(self, step: int, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            _match_layout(self.optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            location = "the run" if self.run is None else self.run.path
            raise RunError(
                f"the checkpoint of {location} is of another model or optimizer: {one_line(error)}"
            ) from error
        if self.excitation is not None and state["excitation"] is not None:
            self.excitation.load_state_dict(state["excitation"])
        watch: object = self.watch
        if state["watch"] is not None and isinstance(watch, Saved):
            watch.load_state_dict(state["watch"])
        self.shuffle.load_state_dict(state["shuffle"])
        self.last = dict(state["last"])
        self.best = float(state.get("best", -math.inf))  # earlier versions did not store it
        self._spent = float(state.get("seconds", 0.0))
        self.step, self.resumed_from = step, step
        self.epoch, self.position = state["progress"]["epoch"], state["progress"]["position"]
        if self.run is not None:
            self.run.rewind(step)
        restore(state["random"], self.device)


def _match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Stores momentum and other state in the memory layout of its parameter, which fused optimizers require; values are equal."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def record_end(run: Run | None, status: Any, reason: str) -> None:
    """Stores in the run how a training ended."""
    # The error under way matters more than one that recording it may add (a full disk fails twice).
    if run is not None:
        with contextlib.suppress(RunError):
            run.flush()
        with contextlib.suppress(RunError):
            run.set_status(status, reason)
