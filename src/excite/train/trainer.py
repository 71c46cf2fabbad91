"""The training loop: one model, one loss, one run. Continues by itself from the run's last checkpoint.

On the CPU, with the same number of threads, a training that was killed and continued ends with the same bits in its
weights and its metrics as one that was not.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from excite._core.calls import check_finite
from excite._core.checks import check_count, check_dense, check_flag, check_model, check_seed, is_whole, shown
from excite._core.preserve import device_of
from excite._core.randomness import capture, own_randomness, restore
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, RunError, TrainingStopped, one_line
from excite.runs.metrics import Busy
from excite.runs.run import Run
from excite.train.cuda_graph import CapturedStep
from excite.train.predictions import Predict, accuracy, decisions
from excite.train.schedule import OneCycle
from excite.train.shuffle import Shuffle
from excite.train.step import Loss, Step
from excite.train.stopping import between_steps, stop_requested

Progress = Callable[[str, int, int], None]
_PENDING = 32  # steps whose losses may wait on a GPU before they are fetched and checked
_PATIENCE, _FINAL_TRIES = 5.0, 60  # seconds to wait for a locked database, and how often before the training ends
_MOST = 2000  # training points for the accuracy after each epoch


class Points(Protocol):
    """Training and test points, such as an `excite.data.Dataset`."""

    @property
    def x_train(self) -> Tensor: ...
    @property
    def y_train(self) -> Tensor: ...
    @property
    def x_test(self) -> Tensor: ...
    @property
    def y_test(self) -> Tensor: ...


class Scheduled(Protocol):
    """What moves with training, such as a `PersistentExcitation`."""

    def advance(self, fraction: float) -> None: ...
    def predict(self, x: Tensor) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Watching(Protocol):
    def step(self, loss: Tensor) -> None: ...


@runtime_checkable
class Saved(Protocol):
    """What is kept in checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Fitted:
    """What a training ended with. Accuracies are None for regression and for sets without test points."""

    steps: int
    loss: float
    train_accuracy: float | None
    test_accuracy: float | None
    resumed_from: int | None  # the step of the checkpoint it continued from
    why_not_captured: str | None = None  # why steps ran one kernel at a time instead of as a CUDA graph


def fit(
    model: nn.Module,
    data: Points,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    batch: int,
    seed: int = 0,
    run: Run | None = None,
    excitation: Scheduled | None = None,
    watch: Watching | None = None,
    checkpoint_every: int | str = "1 epoch",
    predict: Predict | None = None,
    progress: Progress | None = None,
    capture: bool = True,
) -> Fitted:
    """Train `model` with `loss(x, y)`, a mean over the batch.

    With a `run`, the loss of every step (`loss/step`) and the accuracies after every epoch (`accuracy/train`,
    `accuracy/test`) are logged, checkpoints are written, and if there is one already training continues from it.
    The modes of the model's modules are left as they are; the global random state is the user's again afterwards.

    In a process group (`excite.train.many_processes`) all processes call it together, with a model in
    DistributedDataParallel or sharded by FSDP2, the same data, and a `run` in the first process only; `batch` is the
    size of the batch of all of them. See `excite.train.distributed.data_parallel` for what is the same as on one process.

    Args:
        excitation: told once per epoch how much of training is done, and saved with checkpoints.
        watch: its `step(loss)` is called after every optimizer step, and it is saved if it has a `state_dict`.
        checkpoint_every: a number of steps, or text such as "10 steps" or "1 epoch".
        predict: x to labels, for the accuracies; by default that of `excitation`, else threshold 0.5 or argmax.
        progress: called as progress("training", steps done, steps in all).
        capture: on a GPU, run each step as one CUDA graph where that is possible; `why_not_captured` says where not.
    """
    training = make_training(
        model, data, loss, optimizer, epochs, batch, seed, run, excitation, watch, predict, progress
    )
    training.capture = check_flag(capture, "capture") and training.processes == 1
    training.every = parse_every(checkpoint_every, training.per_epoch)
    with training.ending(), own_randomness(seed, training.device):
        training.begin()
        fitted = training.train()
    training.raise_interrupt()
    return fitted


def make_training(model: nn.Module, *rest: Any) -> Training:
    """The training of this process: alone, or with the others of its process group."""
    from excite.train.distributed.data_parallel import SharedTraining
    from excite.train.distributed.processes import these_processes

    here = these_processes()
    return Training(model, *rest) if here.size == 1 else SharedTraining(here, model, *rest)


class Training:
    """The state of one training, and how it moves."""

    def __init__(
        self,
        model: nn.Module,
        data: Points,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        epochs: int,
        batch: int,
        seed: int,
        run: Run | None,
        excitation: Scheduled | None,
        watch: Watching | None,
        predict: Predict | None,
        progress: Progress | None,
    ) -> None:
        epochs, batch, seed = check_count(epochs, "epochs"), check_count(batch, "batch"), check_seed(seed)
        refuse_lazy(check_model(model))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"optimizer: expected a torch.optim.Optimizer; got {shown(optimizer)}")
        if not callable(loss):
            raise InputError(f"loss: expected a function of x and y; got {shown(loss)}")
        _check(data)
        self.model, self.loss, self.optimizer, self.run = model, loss, optimizer, run
        self.excitation, self.watch, self.progress = excitation, watch, progress
        self.device = device_of(model)
        self.x, self.y = data.x_train.to(self.device), data.y_train.to(self.device)
        self.test = (data.x_test.to(self.device), data.y_test.to(self.device))
        # Weights that are no longer finite are measured too: `decide` is `predict` without its checks.
        own = None if excitation is None else getattr(excitation, "decide", excitation.predict)
        self.predict = predict or own or decisions(model)
        self.classifies = not data.y_train.is_floating_point()
        self.epochs, self.per_epoch = epochs, -(-len(self.x) // batch)
        self.settings = {"epochs": epochs, "batch": batch, "seed": seed, "points": len(self.x)}
        self.shuffle = Shuffle(len(self.x), batch, seed)
        self.every = self.per_epoch
        self.epoch, self.position, self.step = 0, 0, 0  # the next batch is number `position` of `epoch`
        self.resumed_from: int | None = None
        self.started = False
        self.interrupted = False  # by Ctrl-C in `progress`: ends after the step
        self.last: dict[str, float] = {}
        self.capture, self.processes = True, 1
        self.transform: Callable[[Tensor], Tensor] | None = None
        self.schedule: OneCycle | None = None
        self._spent, self._since = 0.0, time.perf_counter()  # seconds of training before the last checkpoint, and now
        self._pending: list[Tensor] = []
        self._patience = _PENDING if self.device.type == "cuda" else 1

    def train(self) -> Fitted:
        """All steps that are left after `begin`."""
        step = self.make_step(self.loss, self.optimizer)
        step.check = self.before_update
        with between_steps() if self.processes == 1 else contextlib.nullcontext():
            while self.epoch < self.epochs:
                for at in self.open_epoch():
                    if self.schedule is not None:
                        self.schedule(self.step, self.epochs * self.per_epoch)
                    self.after_update(step(*self.batch(at)))
                    stop_where_asked([self])
                self.close_epoch()
                stop_where_asked([self])
            return self.finish(step.why_not)  # a signal that comes now waits for the final checkpoint

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Whatever ends the training early is said in the run."""
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

    # The parts of a training, for those who take several through the same steps.

    def make_step(self, loss: Loss, optimizer: torch.optim.Optimizer, networks: int = 1) -> Step:
        setting = getattr(self.excitation, "setting", lambda: None)
        return (CapturedStep if self.capture else Step)(loss, optimizer, setting, networks)

    def begin(self) -> None:
        """Continue from the last checkpoint of the run, if there is one."""
        self._resume()
        self.started, self._since = True, time.perf_counter()
        if self.resumed_from is None:
            self._measure_accuracy()

    def open_epoch(self) -> list[Tensor]:
        """The batches of indices that are left of this epoch."""
        if self.excitation is not None:
            self.excitation.advance(self.epoch / self.epochs)
        return self.shuffle.epoch(self.device)[self.position :]

    def batch(self, at: Tensor) -> tuple[Tensor, Tensor]:
        x = self.x[at]
        # Outside the step: random numbers of the CPU would be frozen into a captured one.
        return x if self.transform is None else self.transform(x), self.y[at]

    def before_update(self, loss: Tensor) -> None:
        """On the CPU a loss that is not finite does not reach the weights; a GPU is not made to wait for it."""
        if self._patience == 1:
            self._record(loss)
            self._settle()

    def after_update(self, loss: Tensor) -> None:
        if self._patience > 1:
            self._record(loss)
            if len(self._pending) >= self._patience:
                self._settle()
        if self.watch is not None:
            self.watch.step(loss)
        if self.progress is not None:
            try:
                self.progress("training", self.step, self.epochs * self.per_epoch)
            except KeyboardInterrupt:
                if self.processes > 1:  # a checkpoint needs all of them
                    raise
                self.interrupted = True
        if self.step % self.every == 0 and self.position < self.per_epoch:
            self._checkpoint()

    def raise_interrupt(self) -> None:
        """After a training that was asked to stop when it was as good as done."""
        if self.interrupted or stop_requested():
            raise KeyboardInterrupt

    def checkpoint_now(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self.run is not None and self.step not in [c.step for c in self.run.checkpoints()]:
            self._checkpoint()

    def close_epoch(self) -> None:
        self._settle()
        self._measure_accuracy()
        measured: dict[str, float] = getattr(self.excitation, "measured", dict)()
        if measured:
            self._log(self.step, {f"excitation/{name}": value for name, value in measured.items()})
        self.epoch, self.position = self.epoch + 1, 0
        if self.step % self.every == 0 and self.epoch < self.epochs:
            self._checkpoint()

    def finish(self, why_not_captured: str | None = None, together: int = 1) -> Fitted:
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
        return Fitted(self.step, self.last["loss/step"], train, test, self.resumed_from, why_not_captured)

    @property
    def seconds(self) -> float:
        """What training has taken so far, in all its pieces."""
        return self._spent + time.perf_counter() - self._since

    # Inside

    def _record(self, loss: Tensor) -> None:
        self._pending.append(loss)
        self.step, self.position = self.step + 1, self.position + 1

    def _settle(self) -> None:
        """Fetch, log and check the losses of the steps since the last time."""
        if not self._pending:
            return
        losses = torch.stack([loss.reshape(()) for loss in self._pending])
        values, finite = losses.tolist(), torch.isfinite(losses).tolist()
        first = self.step - len(values) + 1
        self._pending.clear()
        for step, (value, good) in enumerate(zip(values, finite), first):
            self._log(step, {"loss/step": value})
            if not good:
                raise TrainingStopped(
                    f"the loss is {value} at step {step}: training stopped, {self.last_good()}; lower the learning rate "
                    "or the radius, or look at the data"
                )

    def _measure_accuracy(self) -> None:
        if not self.classifies:
            return
        values = {"accuracy/train": self._accuracy(self.x, self.y, _MOST)}
        if len(self.test[0]):
            values["accuracy/test"] = self._accuracy(*self.test)
        self._log(self.step, values)

    def _accuracy(self, x: Tensor, y: Tensor, most: int | None = None) -> float:
        return accuracy(self.model, self.predict, x, y, most)

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.last.update(values)
        if self.run is not None:
            self.run.log(step, values)

    def last_good(self) -> str:
        found = self.run.checkpoints() if self.run is not None else []
        return f"the last good checkpoint is that of step {found[-1].step}" if found else "there is no checkpoint yet"

    # Checkpoints

    def _checkpoint(self, final: bool = False) -> None:
        if self.run is None:
            return
        self._settle()
        # A gradient can be NaN under a finite loss; then the next loss would tell, after the last good state is gone.
        if not self._finite():
            raise self._not_finite()
        self._save(self._state(), final)

    def _save(self, state: dict[str, Any], final: bool) -> None:
        """Write a checkpoint. Where another process holds the metrics, which it must not be ahead of, it is left out, and the
        final one waited for."""
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
        return TrainingStopped(
            f"the weights are not finite after step {self.step}: training stopped, {self.last_good()}; lower the "
            "learning rate or the radius"
        )

    def _state(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "progress": {"epoch": self.epoch, "position": self.position},
            "last": self.last,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "excitation": None if self.excitation is None else self.excitation.state_dict(),
            "watch": self.watch.state_dict() if isinstance(self.watch, Saved) else None,
            "shuffle": self.shuffle.state_dict(between=self.position == 0),
            "random": capture(self.device),
        }

    def _resume(self) -> None:
        found = self._read()
        if found is not None:
            self._restore(*found)

    def _read(self) -> tuple[int, dict[str, Any]] | None:
        """The last checkpoint of the run."""
        if self.run is None:
            return None
        if not self.run.checkpoints():
            if self.run.resumed:
                self.run.rewind(-1)  # killed before its first checkpoint: start over
            return None
        step, state = self.run.load_checkpoint()
        for name, value in self.settings.items():
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
        except (RuntimeError, ValueError, KeyError) as error:
            where = "the run" if self.run is None else self.run.path
            raise RunError(f"the checkpoint of {where} is of another model or optimizer: {one_line(error)}") from error
        if self.excitation is not None and state["excitation"] is not None:
            self.excitation.load_state_dict(state["excitation"])
        watch: object = self.watch
        if state["watch"] is not None and isinstance(watch, Saved):
            watch.load_state_dict(state["watch"])
        self.shuffle.load_state_dict(state["shuffle"])
        self.last = dict(state["last"])
        self._spent = float(state.get("seconds", 0.0))
        self.step, self.resumed_from = step, step
        self.epoch, self.position = state["progress"]["epoch"], state["progress"]["position"]
        if self.run is not None:
            self.run.rewind(step)
        restore(state["random"], self.device)


def stop_where_asked(trainings: Sequence[Training]) -> None:
    """If somebody asked for it, end trainings that are equally far, each with a checkpoint. An epoch is finished first."""
    first = trainings[0]
    if not (stop_requested() or any(training.interrupted for training in trainings)):
        return
    if first.processes > 1 or first.position == first.per_epoch or first.epoch == first.epochs:
        return
    for training in trainings:
        training.checkpoint_now()
    raise KeyboardInterrupt


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def parse_every(every: int | str, per_epoch: int) -> int:
    """Steps between checkpoints, from a number of steps or text such as "10 steps" and "1 epoch"."""
    count, unit = every, "steps"
    if isinstance(every, str):
        number, _, unit = every.strip().partition(" ")
        count = int(number) if number.isdecimal() else 0
    if not is_whole(count) or count < 1 or unit.rstrip("s") not in ("step", "epoch"):
        raise InputError(f"checkpoint_every: expected a number of steps, '10 steps' or '1 epoch'; got {every!r}")
    return count * per_epoch if unit.startswith("epoch") else count


def _check(data: Points) -> None:
    for name in ("x_train", "y_train", "x_test", "y_test"):
        if not isinstance(part := getattr(data, name, None), Tensor) or not check_dense(part, name).dim():
            raise InputError(
                f"data: expected points with tensors such as {name}, as of excite.data.load; got {shown(data)}"
            )
    if not len(data.x_train):
        raise InputError("expected at least one training point; got none")
    for which, x, y in (("training", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        if len(x) != len(y):
            raise InputError(f"expected one label per {which} point; got {len(x)} points and {len(y)} labels")
        check_finite(x, f"{which} points")


def record_end(run: Run | None, status: Any, reason: str) -> None:
    # The error under way matters more than one that recording it may add (a full disk fails twice).
    if run is not None:
        with contextlib.suppress(RunError):
            run.flush()
        with contextlib.suppress(RunError):
            run.set_status(status, reason)
