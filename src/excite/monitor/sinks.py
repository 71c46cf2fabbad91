"""Places for measured values beside the run: TensorBoard, Weights & Biases, MLflow.

    excite.watch(model, x, "runs/first", sinks=["tensorboard"])

Each continues with what the training uses already (an open W&B or MLflow run, a SummaryWriter that is passed) and
leaves that open; what it has to open itself, it closes. Names are those of `run.frame()`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from excite._core.checks import need
from excite.errors import InputError
from excite.monitor.writer import Sink

_PREFIX = "excite/"


class TensorBoard:
    """Writes scalars to TensorBoard.

    Args:
        folder: Folder of the event files.
        writer: A SummaryWriter of the training, to be used instead; it is left open.

    Example:
        >>> class Writer:
        ...     def add_scalar(self, name, value, step):
        ...         print(name, value, step)
        >>> TensorBoard(writer=Writer()).log(10, {"loss": 0.5})
        excite/loss 0.5 10
    """

    name = "tensorboard"

    def __init__(self, folder: str | os.PathLike[str] | None = None, writer: Any = None):
        self._own = writer is None
        if writer is None:
            need("tensorboard", "tensorboard")
            writer = need("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder or "runs/tensorboard"))
        self._writer = writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step.

        Args:
            step: Training step.
            values: Values by the name of the metric.
        """
        for name, value in values.items():
            self._writer.add_scalar(_PREFIX + name, value, step)

    def close(self) -> None:
        """Closes the writer if it was made here, else flushes it."""
        self._writer.close() if self._own else self._writer.flush()


class WandB:
    """Writes metrics to Weights & Biases: to the open run, or to a new one. Their x axis is `excite/step`.

    Args:
        run: A W&B run to be used instead; it is left open.
        **options: Arguments of `wandb.init` for a new run.

    Example:
        >>> watch = excite.watch(model, example=x, run="runs/mine", sinks=[WandB(project="mine")])  # doctest: +SKIP
    """

    name = "wandb"

    def __init__(self, run: Any = None, **options: Any):
        wandb = need("wandb", "wandb")
        run = wandb.run if run is None else run
        self._own = run is None
        self._run = wandb.init(**{"project": "excite", **options}) if run is None else run
        # An axis of our own: W&B's steps only grow, and a training logs to them as well.
        self._run.define_metric(f"{_PREFIX}step")
        self._run.define_metric(f"{_PREFIX}*", step_metric=f"{_PREFIX}step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step.

        Args:
            step: Training step.
            values: Values by the name of the metric.
        """
        self._run.log({f"{_PREFIX}step": step, **{_PREFIX + name: value for name, value in values.items()}})

    def close(self) -> None:
        """Finishes the run if it was started here."""
        if self._own:
            self._run.finish()


class MLflow:
    """Writes metrics to MLflow as excite/probe/quantity.layer: to the active run, or to a new one.

    The file store keeps names as paths, where "a" and "a/b" cannot both exist. Characters that it does not accept become "_".

    Args:
        run_id: The run to use instead.
        client: The MlflowClient to use.

    Example:
        >>> watch = excite.watch(model, example=x, run="runs/mine", sinks=[MLflow()])  # doctest: +SKIP
    """

    name = "mlflow"

    def __init__(self, run_id: str | None = None, client: Any = None):
        mlflow = need("mlflow", "mlflow")
        active = mlflow.active_run()
        self._own = run_id is None and active is None
        if run_id is None:
            run_id = (mlflow.start_run() if active is None else active).info.run_id
        self._mlflow, self._id = mlflow, run_id
        self._client = client or mlflow.MlflowClient()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step.

        Args:
            step: Training step.
            values: Values by the name of the metric.
        """
        import time

        from mlflow.entities import Metric

        timestamp = int(1000 * time.time())
        metrics = [Metric(_PREFIX + _plain(name), _bounded(value), timestamp, step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):  # the server's limit
            self._client.log_batch(self._id, metrics[start : start + 1000])

    def close(self) -> None:
        """Ends the run if it was started here."""
        if self._own:
            self._mlflow.end_run()


def _plain(name: str) -> str:
    probe, _, quantity = name.partition("/")
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in f"{probe}/{quantity.replace('/', '.')}")


def _bounded(value: float) -> float:
    """MLflow's databases take no infinities."""
    return math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value


_BY_NAME: dict[str, Callable[[], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_sinks(sinks: Sequence[str | Sink], folder: Path | None) -> list[Sink]:
    """Sinks by name or as they are; TensorBoard's files go into the run's folder, if there is one."""
    if isinstance(sinks, str):
        raise InputError(f"sinks: expected a list such as ['tensorboard']; got {sinks!r}")
    made: list[Sink] = []
    try:
        for destination in sinks:
            if isinstance(destination, str):
                if destination not in _BY_NAME:
                    raise InputError(
                        f"sinks: expected {', '.join(_BY_NAME)} or an object with log and close; got {destination!r}"
                    )
                made.append(
                    TensorBoard(folder and folder / "tensorboard")
                    if destination == "tensorboard"
                    else _BY_NAME[destination]()
                )
            elif callable(getattr(destination, "log", None)) and callable(getattr(destination, "close", None)):
                made.append(destination)
            else:
                raise InputError(
                    f"sinks: expected {', '.join(_BY_NAME)} or an object with log and close; got {destination!r}"
                )
    except BaseException:
        for sink in made:
            sink.close()
        raise
    return made
