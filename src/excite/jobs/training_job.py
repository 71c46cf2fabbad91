"""The job of sweeps and of most studies: one training, and the measurement of the trained model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from excite.errors import InputError, RunError
from excite.jobs.progress import JobProgress, ProgressCallback, done
from excite.margin import SearchOptions
from excite.runs import Run, load_run
from excite.train import from_config as training
from excite.train.config import TrainConfig, parse_config
from excite.train.evaluate import PARTS, SavedModel, artifact_name, load_model, measure

TRAINING_FRACTION = 0.75  # of a job's time, for its progress


class Measurement(Protocol):
    """Measurement of a trained model by a job, written into the artifacts of its run."""

    def is_measured(self, run: Run, config: TrainConfig) -> bool:
        """Whether the run holds the measurement already."""

    def measure(self, saved: SavedModel, variant: str, progress: Callable[[float], None]) -> None:
        """Measures a model; `progress` is called with the fraction done."""


@dataclass(frozen=True)
class MarginMeasurement:
    """Margins of training and test points, and the accuracy.

    Args:
        points: At most this many points of each; all by default.
        certify: Whether lower bounds are computed too.
    """

    points: int | None = None
    certify: bool = True

    def is_measured(self, run: Run, config: TrainConfig) -> bool:
        """Whether the run holds margins of as many points as this measurement takes."""
        names = [artifact_name("inf", split) for split in PARTS]
        if not all((run.path / f"artifacts/{name}.json").exists() for name in [*names, "summary"]):
            return False
        for split, name in zip(PARTS, names):
            available = getattr(config.data, split)
            expected = min(n for n in (self.points, available) if n is not None) if self.points is not None else 0
            if len(run.read_json(name).get("values", ())) < expected:
                return False
        return True

    def measure(self, saved: SavedModel, variant: str, progress: Callable[[float], None]) -> None:
        """Measures margins on training and test points and stores them in the run."""

        def on_points(phase: str, done: int, total: int) -> None:
            progress((0.5 if phase.endswith("test") else 0.0) + 0.5 * done / max(total, 1))

        measure(
            saved,
            variant=variant,
            max_points=self.points,
            options=SearchOptions(certify=self.certify),
            progress=on_points,
        )


@dataclass(frozen=True)
class NoMeasurement:
    """Nothing beyond what the training itself writes."""

    def is_measured(self, run: Run, config: TrainConfig) -> bool:
        """Always true: there is nothing to measure."""
        return True

    def measure(self, saved: SavedModel, variant: str, progress: Callable[[float], None]) -> None:
        """Measures nothing."""
        progress(1.0)


@dataclass(frozen=True)
class TrainingJob:
    """One training and its measurement.

    Args:
        variant: Name of the way of training; jobs of one variant differ only in their seed.
        seed: The seed, also set in `config`.
        folder: The run folder.
        config: What is trained.
        measurement: What is measured of the trained model.
    """

    variant: str
    seed: int
    folder: Path
    config: TrainConfig
    measurement: Measurement = MarginMeasurement()

    def trained(self) -> bool:
        """Whether the training is complete, on whichever device."""
        return self._check_run(lambda run: True)

    def finished(self) -> bool:
        """Whether the training and its measurement are complete."""
        return self._check_run(lambda run: self.measurement.is_measured(run, self.config))

    def _check_run(self, is_measured: Callable[[Run], bool]) -> bool:
        if not (self.folder / "run.json").exists():
            return False
        # A damaged run is not finished: `run` says why, and the other jobs continue.
        with suppress(RunError), load_run(self.folder) as run:
            return run.status == "done" and self._is_same_config(run) and is_measured(run)
        return False

    def _is_same_config(self, run: Run) -> bool:
        try:
            stored = parse_config(run.config)
        except InputError:
            return False
        return stored.model_copy(update={"device": self.config.device}) == self.config

    def run(self, on_progress: ProgressCallback) -> None:
        """Trains, continuing from the last checkpoint, and measures; refuses a folder that holds another config."""
        name = self.folder.name

        def on_step(phase: str, done: int, total: int) -> None:
            on_progress(self.training_progress(done, total))

        def on_measured(fraction: float) -> None:
            on_progress(JobProgress(name, "measuring", TRAINING_FRACTION + (1 - TRAINING_FRACTION) * fraction))

        with training.train(self.config, self.folder, progress=on_step) as run:
            newest = run.checkpoints()[-1].path  # built by its config, which is this job's
        saved = load_model(newest, trust=True).to(training.find_device(self.config.device))
        self.measurement.measure(saved, self.variant, on_measured)
        on_progress(done(name))

    def training_progress(self, done: int, total: int) -> JobProgress:
        """The progress of this job after `done` of `total` steps of its training."""
        return JobProgress(self.folder.name, "training", TRAINING_FRACTION * done / max(total, 1))
