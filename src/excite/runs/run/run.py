"""A run is a folder.

    run.json            what this is, and how it ended
    config.json         the config that made it
    environment.json    versions and machine
    metrics.db          everything measured: step, name, value
    checkpoints/        model, optimizer, schedule and random state, to continue from
    artifacts/          results as JSON, such as margins

One process writes at a time; any number read meanwhile.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from excite._core.checks import check_count, check_flag, check_model, check_number, check_text
from excite._core.files import read_json, write_json
from excite._core.wrappers import is_sharded, is_shared
from excite.errors import InputError, RunError
from excite.runs import checkpoints, weights
from excite.runs.checkpoints import Checkpoint
from excite.runs.checks import MAX_STEP, check_keep, check_step
from excite.runs.import_paths import ModelSource, model_source
from excite.runs.run.lifecycle import RunLifecycle
from excite.runs.store import is_url
from excite.runs.weights import full_state, not_rebuilt

if TYPE_CHECKING:
    import pandas as pd

_ARTIFACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Run(RunLifecycle):
    """A run folder: config, environment, metrics, checkpoints and artifacts of one training.

    Open it with `Run.create` (a new run), `Run.open` (an existing one) or `excite.load_run` (for reading). A run open for
    writing is a context manager that sets its status at the end: "done", or "failed" or "stopped" with the reason.

    Attributes:
        path: The folder.
        mode: "r" (reading) or "a" (writing).
        resumed: Whether the run existed before it was opened.
        keep: Number of checkpoints kept beside the final one.
        config: The config that made the run.
        environment: Versions and machine.

    Example:
        >>> with Run.create("runs/first", {"lr": 0.1}) as run:
        ...     run.log(1, {"loss/step": 0.7})
        >>> load_run("runs/first").series("loss/step")
    """

    # Metrics

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs metrics. They are buffered; readers see them within seconds, or after `flush`.

        Args:
            step: Number of optimizer steps done.
            values: Values by name, such as "probe/quantity/layer".

        Raises:
            InputError: If the step, a name or a value is invalid.
            RunError: If the run is not open for writing, or the metrics cannot be written.
        """
        self._writable()
        self._metrics.log(step, values)

    def log_many(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Values of several steps, (step, values by name), written to the disk in one transaction."""
        self._writable()
        self._metrics.log_many(rows)

    def flush(self) -> None:
        """Writes all buffered metrics, so that readers see them.

        Raises:
            RunError: If they cannot be written.
        """
        self._metrics.flush()

    def patience(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Context that limits how long `log` and `flush` wait for a locked database.

        Args:
            seconds: Timeout. Outside of the context: 30 seconds.

        Returns:
            The context manager.
        """
        return self._metrics.patience(check_number(seconds, "seconds", 0, 1e6))

    def rewind(self, step: int) -> None:
        """Deletes the metrics of later steps, which a killed process logged after its last checkpoint.

        Args:
            step: Last step to keep; -1 deletes all metrics.

        Raises:
            RunError: If the run is not open for writing, or the metrics cannot be written.
        """
        self._writable()
        self._metrics.rewind(check_count(step, "step", -1, 2**128))

    def thin(self, before: int, every: int) -> int:
        """Deletes most metrics of old steps for good, which makes metrics.db smaller.

        Args:
            before: Only steps before this one are thinned.
            every: Each metric keeps its first value of every `every` steps.

        Returns:
            Number of values deleted.

        Raises:
            RunError: If the run is not open for writing, or the metrics cannot be written.
        """
        self._writable()
        check_count(before, "before", 0, MAX_STEP), check_count(every, "every", 1, MAX_STEP)
        return self._metrics.thin(int(before), int(every))

    def names(self) -> list[str]:
        """Returns the names of all metrics, sorted."""
        return self._metrics.names()

    def series(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Returns one metric.

        Args:
            name: Name of the metric.

        Returns:
            Steps (int64) and values (float64), ordered by step.

        Raises:
            RunError: If the run has no such metric.
        """
        steps, values = self._metrics.series(check_text(name, "name"))
        if not len(steps):
            near = difflib.get_close_matches(name, self.names(), 1)
            hint = f": did you mean {near[0]!r}?" if near else ": run.names() lists what there is"
            raise RunError(f"{self.path} has no metric {name!r}{hint}")
        return steps, values

    def frame(self) -> pd.DataFrame:
        """Returns all metrics as a pandas DataFrame with columns step, name and value, ordered by step, then name."""
        import pandas as pd

        rows = self._metrics.rows()
        return pd.DataFrame(
            {
                "step": np.array([row[0] for row in rows], np.int64),
                "name": pd.Series([row[1] for row in rows], dtype="str"),
                "value": np.array([row[2] for row in rows], np.float64),
            }
        )

    # Checkpoints and artifacts

    def checkpoints(self) -> list[Checkpoint]:
        """Returns the checkpoints of the run, oldest first."""
        return checkpoints.find(self._checkpoint_folder)

    def save_checkpoint(self, step: int, state: Mapping[str, Any], *, final: bool = False) -> Checkpoint:
        """Writes a checkpoint, and deletes all but the last `keep` and final ones.

        Args:
            step: Number of optimizer steps done.
            state: Nested dicts, lists and tuples of tensors and scalars.
            final: Whether this is the end of the training.

        Returns:
            The checkpoint.

        Raises:
            InputError: If the step is invalid or the state cannot be stored.
            RunError: If the run is not open for writing, or the file cannot be written.
        """
        self._writable()
        number = check_step(step)
        if not isinstance(state, Mapping):
            raise InputError(f"expected the state as a dict; got {type(state).__name__}")
        self.flush()  # a checkpoint is never ahead of its metrics
        return checkpoints.write(
            self._checkpoint_folder,
            number,
            dict(state),
            final=check_flag(final, "final"),
            keep=check_keep(self.keep),
            commits=self._metrics.commits,
        )

    def load_checkpoint(self, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
            step: Step of the checkpoint. Default: the newest.

        Returns:
            Step and state, with tensors on the CPU.

        Raises:
            RunError: If there is no such checkpoint, it is damaged, or (for a run open for writing) the metrics end before it.
        """
        matching = [c for c in self.checkpoints() if step is None or c.step == step]
        if not matching:
            missing = "no checkpoint" if step is None else f"no checkpoint at step {step}"
            existing = ", ".join(str(c.step) for c in self.checkpoints()) or "none"
            raise RunError(f"{self.path} has {missing} (existing: {existing})")
        number, state, commits = checkpoints.read_with_commits(matching[-1].path)
        if self.mode == "a":
            self._check_metrics(number, commits)
        return number, state

    def save(
        self,
        model: nn.Module,
        factory: str | Callable[..., Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
    ) -> Path:
        """Stores the weights of a model and how to build it, as `artifacts/model.safetensors`; replaces those stored before.

        `excite margins RUN` and `excite audit RUN` then measure this model. Wrappers of DistributedDataParallel and torch.compile
        are left out. Tied weights are stored under each of their names.

        Args:
            model: The model.
            factory: Name of a built-in model, "module:function", or a function or class that another program can import.
                Default: the class of the model, if it builds this model without arguments; otherwise a warning says what is
                missing, and the weights are loaded with `--model MODULE:FACTORY`.
            options: Keyword arguments of the factory, as JSON values.
            step: Number of optimizer steps done. Default: the last step of the metrics.

        Returns:
            Path of the file.

        Raises:
            InputError: If the factory cannot be imported, the options are not JSON, or the weights cannot be stored.
            RunError: If the run is not open for writing, or the file cannot be written.

        Example:
            >>> run.save(model, "models:Net", {"width": 64})  # doctest: +SKIP
        """
        self._writable()
        source = model_source(check_model(model), factory, options)
        if is_sharded(model) and is_shared(model):
            raise InputError(
                "the weights are sharded over processes: use excite.watch(checkpoint=...), which collects them"
            )
        if source.factory is None:
            warnings.warn(not_rebuilt(source), stacklevel=2)
        self.flush()
        last = self._metrics.last_step() if step is None else check_step(step)
        return self.save_weights(full_state(model), last or 0, source)

    def save_weights(self, state: dict[str, Tensor], step: int, source: ModelSource, *, best: bool = False) -> Path:
        """Stores collected weights as `save` does.

        Args:
            state: Parameters and buffers by name, complete where the model is sharded.
            step: Step of the training at which the model has these weights.
            source: How the model is made again, for `excite margins` and `excite audit`.
            best: Whether they are those of the best epoch: stored as `artifacts/best.safetensors`, beside the newest ones.

        Returns:
            Path of the file.
        """
        self._writable()
        return weights.write(self.path / (weights.BEST if best else weights.NAME), state, check_step(step), source)

    def write_json(self, name: str, value: Any) -> Path:
        """Writes a value as `artifacts/NAME.json`.

        Args:
            name: Name of letters, digits, ".", "-" and "_".
            value: JSON value.

        Returns:
            Path of the file.

        Raises:
            InputError: If the name is invalid or the value is not JSON.
            RunError: If the run is not open for writing, or the file cannot be written.
        """
        self._writable()
        path = self._artifact(name)
        write_json(path, value)
        return path

    def read_json(self, name: str) -> Any:
        """Reads the value of `artifacts/NAME.json`.

        Args:
            name: Name of the artifact.

        Returns:
            The JSON value.

        Raises:
            InputError: If the name is invalid.
            RunError: If there is no such artifact, or it is damaged.
        """
        return read_json(self._artifact(name))

    def _artifact(self, name: str) -> Path:
        if not _ARTIFACT.fullmatch(name):
            raise InputError(f"expected a name of letters, digits, '.', '-' and '_'; got {name!r}")
        return self.path / "artifacts" / f"{name.removesuffix('.json')}.json"

    def _check_metrics(self, step: int, commits: int) -> None:
        """A checkpoint is never ahead of its metrics, unless some were lost since."""
        self.flush()
        if self._metrics.commits < commits:
            last = self._metrics.last_step()
            extent = "are empty" if last is None else f"end at step {last}"
            raise RunError(
                f"{self.path}: the metrics {extent}, the checkpoint is of step {step}: was metrics.db-wal lost, or metrics.db "
                f"restored from an older copy? Put it back, or `excite repair {self.path}` to continue without what is missing"
            )


def load_run(path: str | os.PathLike[str]) -> Run:
    """Opens a run folder for reading, also while another process writes to it.

    Args:
        path: Run folder, or a URL of a store; the run is copied to the local disk first.

    Returns:
        The run.

    Raises:
        RunError: If there is no run folder, or it is damaged.

    Example:
        >>> with Run.create("runs/first", {"lr": 0.1}) as run:
        ...     run.log(1, {"loss/step": 0.7})
        >>> run = load_run("runs/first")
        >>> run.frame()  # columns step, name, value
    """
    if is_url(path):
        from excite.runs.copies import local_copy

        path = local_copy(str(path), checkpoints=True)
    return Run.open(path, "r")
