"""Settings and result of a training, and what it asks of data, excitation and watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from excite._core.calls import check_finite
from excite._core.checks import check_count, check_dense, check_flag, check_seed, is_whole, shown
from excite._core.progress import Progress
from excite.errors import InputError
from excite.runs.run import Run
from excite.train.predictions import Predict
from excite.train.schedule import RateSchedule


class TrainingData(Protocol):
    """Training and test points, such as an `excite.data.Dataset`."""

    @property
    def x_train(self) -> Tensor:
        """Training inputs."""
        ...

    @property
    def y_train(self) -> Tensor:
        """Training labels."""
        ...

    @property
    def x_test(self) -> Tensor:
        """Test inputs."""
        ...

    @property
    def y_test(self) -> Tensor:
        """Test labels."""
        ...


class Scheduled(Protocol):
    """An object that is advanced with training, such as a `PersistentExcitation`."""

    def advance(self, fraction: float) -> None:
        """Tells the method which fraction of the training is done."""
        ...

    def predict(self, x: Tensor) -> Tensor:
        """Returns the class of each input."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state."""
        ...


class Watching(Protocol):
    """An observer of every step, such as an `excite.watch`."""

    def step(self, loss: Tensor) -> None:
        """Reports one optimizer step and its loss."""
        ...


@runtime_checkable
class Saved(Protocol):
    """An object with state in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state."""
        ...


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run.

    Attributes:
        steps: Number of optimizer steps.
        loss: Loss of the last step, before its update.
        train_accuracy: Accuracy on the training points; None for regression.
        test_accuracy: Accuracy on the test points; None for regression and for sets without test points.
        resumed_from: Step of the checkpoint that training was resumed from; None if it started from the beginning.
        why_not_captured: Why steps were not run as a CUDA graph; None if they were.

    Example:
        >>> data = excite.data.load("moons")
        >>> model = build("mlp", inputs=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> result = fit(model, data, squared_error(model), optimizer, epochs=1, batch=100)
        >>> result.steps > 0, result.resumed_from
        (True, None)
    """

    steps: int
    loss: float
    train_accuracy: float | None
    test_accuracy: float | None
    resumed_from: int | None
    why_not_captured: str | None = None


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of a `Trainer`: everything except the model, the data, the loss and the optimizer.

    Attributes:
        epochs: Number of passes over the training points.
        batch: Batch size, over all processes.
        seed: Seed of the order of the points and of everything random in the steps.
        run: Run to log to and to resume from.
        excitation: Its `advance` is called once per epoch, and its state is saved in checkpoints.
        watch: Its `step(loss)` is called after every optimizer step; its state is saved if it has a `state_dict`.
        checkpoint_every: Number of steps, or text such as "10 steps" or "1 epoch".
        predict: Function from x to labels, used for the accuracies.
        progress: Called as `progress("training", steps_done, steps_total)`.
        capture: Whether to run steps as CUDA graphs where possible. Ignored on several processes.
        transform: Applied to the points of every batch before the step.
        schedule: Sets the learning rate before every step.
        evaluate: Called with the number of epochs done, before training and after every epoch; the values it returns are
            logged by name.
        save_best: Name of a value of `evaluate`: the weights of the epoch at which it is largest are stored in the run.
    """

    epochs: int
    batch: int
    seed: int = 0
    run: Run | None = None
    excitation: Scheduled | None = None
    watch: Watching | None = None
    checkpoint_every: int | str = "1 epoch"
    predict: Predict | None = None
    progress: Progress | None = None
    capture: bool = True
    transform: Callable[[Tensor], Tensor] | None = None
    schedule: RateSchedule | None = None
    evaluate: Callable[[int], dict[str, float]] | None = None
    save_best: str | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("epochs", check_count(self.epochs, "epochs")),
            ("batch", check_count(self.batch, "batch")),
            ("seed", check_seed(self.seed)),
            ("capture", check_flag(self.capture, "capture")),
        ):
            object.__setattr__(self, name, value)


def parse_every(every: int | str, per_epoch: int) -> int:
    """Steps between checkpoints, from a number of steps or text such as "10 steps" and "1 epoch"."""
    count, unit = every, "steps"
    if isinstance(every, str):
        number, _, unit = every.strip().partition(" ")
        count = int(number) if number.isdecimal() else 0
    if not is_whole(count) or count < 1 or unit.rstrip("s") not in ("step", "epoch"):
        raise InputError(f"checkpoint_every: expected a number of steps, '10 steps' or '1 epoch'; got {every!r}")
    return count * per_epoch if unit.startswith("epoch") else count


def check_points(data: TrainingData) -> None:
    """Raises an InputError unless there are tensors of points and labels, as many of each."""
    for name in ("x_train", "y_train", "x_test", "y_test"):
        if not isinstance(tensor := getattr(data, name, None), Tensor) or not check_dense(tensor, name).dim():
            raise InputError(
                f"data: expected points with tensors such as {name}, as of excite.data.load; got {shown(data)}"
            )
    if not len(data.x_train):
        raise InputError("expected at least one training point; got none")
    for split, x, y in (("training", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        if len(x) != len(y):
            raise InputError(f"expected one label per {split} point; got {len(x)} points and {len(y)} labels")
        check_finite(x, f"{split} points")
