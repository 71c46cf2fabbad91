"""A sweep: one training config with lists or ranges in it; every combination (or a random sample) is trained and compared."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from excite._core.compatibility import converted_keywords, renamed_attribute, renamed_keywords, renamed_names
from excite._core.files import write_json
from excite.errors import InputError
from excite.jobs.executors import Executor
from excite.jobs.progress import ProgressCallback, count_jobs, with_tracker
from excite.jobs.scheduler import JobsFailed, run_jobs
from excite.jobs.training_job import MarginMeasurement, Measurement, NoMeasurement, TrainingJob
from excite.jobs.workspace import Workspace, find_workspace
from excite.margin import Margins
from excite.runs import load_run
from excite.train.config import parse_config, read_config
from excite.train.evaluate import PARTS, artifact_name

Count = Annotated[int, Field(ge=1)]
MARGIN_METRICS = ("accuracy", "margin", "gap")  # those that need a measurement after the training


class Range(BaseModel):
    """Numbers between two others.

    Args:
        low: Lowest number.
        high: Highest number.
        log: Whether the numbers are spaced (or drawn) evenly in their logarithm.
        count: How many of them are on a grid.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    low: float
    high: float
    log: bool = False
    count: Count = 3

    def at(self, fraction: float) -> float:
        """The number at a fraction of the way from `low` to `high`."""
        if not self.log:
            return self.low + fraction * (self.high - self.low)
        return math.exp(math.log(self.low) + fraction * (math.log(self.high) - math.log(self.low)))


class SweepConfig(BaseModel):
    """The table [sweep] of a config.

    Args:
        over: Dotted keys of the training config, each with a list of values or a range.
        metric: "accuracy" (of test points), "margin" (their median margin), "gap" (of the margin curves), or the name of
            any metric of the run, whose last value is used.
        goal: "max" or "min"; by default "min" for "gap", else "max".
        method: "grid" for every combination, "random" for a sample of `budget` combinations, the same each time.
        budget: Maximal number of combinations.
        seeds: Trainings of each combination, with seeds 0 to `seeds` - 1.
        points: Number of training and of test points whose margins are measured.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    over: dict[str, list[Any] | Range]
    metric: str = "accuracy"
    goal: Literal["max", "min"] | None = None
    method: Literal["grid", "random"] = "grid"
    budget: Count | None = None
    seeds: Count = 1
    points: Count | None = 200

    @property
    def maximize(self) -> bool:
        """Whether a higher metric is better."""
        return self.goal != "min" and (self.goal == "max" or self.metric != "gap")


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep, and the values of each combination by the name of its variant.

    Attributes:
        config: The table "sweep" of the config.
        jobs: One training for each combination and seed.
        combinations: Values by the name of the variant.
        workspace: Where the runs are.

    Example:
        >>> config = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 1,
        ...           "batch": 20, "sweep": {"over": {"optimizer.lr": [0.1, 0.01]}, "metric": "accuracy"}}
        >>> list(plan(config, "sweep").combinations)
        ['optimizer.lr 0.1', 'optimizer.lr 0.01']
    """

    config: SweepConfig
    jobs: tuple[TrainingJob, ...]
    combinations: Mapping[str, Mapping[str, Any]]
    workspace: Workspace

    tasks = renamed_attribute("tasks", "jobs")
    place = renamed_attribute("place", "workspace")


@dataclass(frozen=True)
class SweepRow:
    """One combination: its name, its values, and the metric of every finished seed.

    Attributes:
        name: Name of the variant.
        values: Values by the key of the config.
        scores: The metric of every finished seed.

    Example:
        >>> SweepRow("lr 0.1", {"lr": 0.1}, (0.9, 0.8)).mean
        0.85...
    """

    name: str
    values: Mapping[str, Any]
    scores: tuple[float, ...]

    found = renamed_attribute("found", "scores")

    @property
    def mean(self) -> float:
        """Mean over seeds; nan if no seed is finished."""
        return float(np.mean(self.scores)) if self.scores else math.nan


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep; `print` shows it as a table.

    Args:
        sweep: The sweep.
        rows: One for each combination, from best to worst.
        folder: Folder of sweep.json and of the runs.
        failed: The error in one line, if some jobs could not be finished.

    Example:
        >>> print(run_sweep(read_sweep("sweep.toml", "runs/sweeps/first")))  # doctest: +SKIP
    """

    sweep: Sweep
    rows: tuple[SweepRow, ...]
    folder: Path
    failed: str | None = None

    def __str__(self) -> str:
        keys = list(self.sweep.config.over)
        head = [*keys, f"{self.sweep.config.metric}, mean of seeds", "lowest", "highest", "seeds"]
        lines = [head]
        for row in self.rows:
            extremes = [f"{min(row.scores):.4g}", f"{max(row.scores):.4g}"] if row.scores else ["–", "–"]
            mean = f"{row.mean:.4g}" if row.scores else "–"
            lines.append([*(_short(row.values[key]) for key in keys), mean, *extremes, str(len(row.scores))])
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def read_sweep(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Sweep:
    """Plans the sweep in a .toml or .json file.

    Args:
        path: The file: a training config with a table [sweep].
        folder: Folder or URL (such as s3://bucket/sweep) for the runs.

    Returns:
        The sweep, for `run_sweep`.

    Raises:
        InputError: If the file cannot be read, or the config of any combination is not valid.

    Example:
        >>> sweep = read_sweep("sweep.toml", "runs/sweeps/first")  # doctest: +SKIP
    """
    return plan(read_config(path), folder, str(path))


def plan(values: Mapping[str, Any], folder: str | os.PathLike[str], where: str = "config") -> Sweep:
    """Plans a sweep; all configs are checked before one is trained.

    Args:
        values: A training config with a table "sweep" (see `SweepConfig`).
        folder: Folder or URL (such as s3://bucket/sweep) for the runs.
        where: Name of the config in error messages.

    Returns:
        The sweep, for `run_sweep`.

    Raises:
        InputError: If the config of any combination is not valid.

    Example:
        >>> config = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 1,
        ...           "batch": 20, "sweep": {"over": {"batch": [10, 20]}, "metric": "accuracy", "seeds": 2}}
        >>> len(plan(config, "sweep").jobs)
        4
    """
    workspace = find_workspace(folder)
    base = {key: value for key, value in values.items() if key != "sweep"}
    config = _parse_sweep(values, where)
    measurement: Measurement = NoMeasurement()
    if config.metric in MARGIN_METRICS:
        measurement = MarginMeasurement(config.points, certify=False)
    combinations: dict[str, Mapping[str, Any]] = {}
    jobs: list[TrainingJob] = []
    slugs: dict[str, str] = {}
    for combination in _combinations(config, where):
        name = ", ".join(f"{key} {_short(value)}" for key, value in combination.items())
        settings = copy.deepcopy(base)
        for key, value in combination.items():
            _set(settings, key, value)
        for seed in range(config.seeds):
            parsed = parse_config({**settings, "seed": seed}, f"{where}, {name}")
            jobs.append(TrainingJob(name, seed, workspace.folder / f"{_slug(name, slugs)}-{seed}", parsed, measurement))
        combinations[name] = combination
    return Sweep(config, tuple(jobs), combinations, workspace)


def _parse_sweep(values: Mapping[str, Any], where: str) -> SweepConfig:
    try:
        config = SweepConfig.model_validate(values.get("sweep", {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{where}: sweep.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if not config.over or any(isinstance(choices, list) and not choices for choices in config.over.values()):
        raise InputError(f"{where}: sweep.over: expected keys of the config, each with a list of values or a range")
    if "seed" in config.over or values.get("seed", 0) != 0:
        raise InputError(
            f"{where}: seed: every combination is trained with seeds 0 to sweep.seeds - 1: leave it out and set sweep.seeds"
        )
    for key, choices in config.over.items():
        if isinstance(choices, Range) and not (choices.low < choices.high and (not choices.log or choices.low > 0)):
            raise InputError(f"{where}: sweep.over.{key}: expected low < high, and low > 0 with log")
    return config


@renamed_keywords(engine="executor")
@converted_keywords(progress=("on_progress", count_jobs), show=("on_progress", with_tracker))
def run_sweep(
    sweep: Sweep,
    workers: int = 2,
    on_progress: ProgressCallback | None = None,
    executor: Executor | None = None,
    *,
    retries: int = 1,
) -> SweepResult:
    """Trains the combinations that are not trained yet, compares them, and writes sweep.json.

    Args:
        sweep: The sweep, from `read_sweep` or `plan`.
        workers: Worker processes on the CPU; 1 for this process.
        on_progress: Called with an `excite.jobs.progress.JobProgress` whenever a job changes.
        executor: Runs the jobs, from `excite.jobs.executors.find_executor`; by default this process and its workers.
        retries: Without an executor: how often a job is started again after an error that may be transient.

    Returns:
        The combinations from best to worst. Jobs that failed are reported in `failed`, not raised.

    Raises:
        RunError: If another process works in the folder of the sweep, or it cannot be written.

    Example:
        >>> sweep = read_sweep("sweep.toml", "runs/sweeps/first")  # doctest: +SKIP
        >>> print(run_sweep(sweep, workers=4))  # doctest: +SKIP
    """
    workspace, failed = sweep.workspace, None
    with workspace.lock():
        try:
            run_jobs(sweep.jobs, workers, on_progress, executor, workspace=workspace, retries=retries)
        except JobsFailed as error:
            failed = str(error)
        workspace.download(sweep.jobs)
        finished = [job for job in sweep.jobs if job.finished()]
        rows = [_row(sweep, name, finished) for name in sweep.combinations]
        sign = -1 if sweep.config.maximize else 1
        rows.sort(key=lambda row: math.inf if math.isnan(row.mean) else sign * row.mean)
        stored = [{"values": dict(row.values), sweep.config.metric: list(row.scores)} for row in rows]
        content = {"sweep": sweep.config.model_dump(), "rows": stored, "failed": failed}
        write_json(workspace.folder / "sweep.json", content)
    return SweepResult(sweep, tuple(rows), workspace.folder, failed)


def _row(sweep: Sweep, name: str, finished: Sequence[TrainingJob]) -> SweepRow:
    scores = (_metric(job.folder, sweep.config.metric) for job in finished if job.variant == name)
    return SweepRow(name, sweep.combinations[name], tuple(scores))


def _metric(folder: Path, metric: str) -> float:
    with load_run(folder) as run:
        if metric == "accuracy":
            return float(run.read_json("summary")["accuracy"]["test"])
        if metric in MARGIN_METRICS:
            train, test = (Margins.from_dict(run.read_json(artifact_name("inf", split))) for split in PARTS)
            return float(test.median) if metric == "margin" else float(train.gap(test, resamples=1).value)
        if metric not in run.names():
            expected = f"{', '.join(MARGIN_METRICS)} or one of {', '.join(run.names())}"
            raise InputError(f"sweep.metric: the run has no metric {metric!r}; expected {expected}")
        return float(run.series(metric)[1][-1])


def _combinations(config: SweepConfig, where: str) -> list[dict[str, Any]]:
    """The values of each training, in the order of the config's keys.

    Not scikit-learn's ParameterGrid and ParameterSampler: the first sorts the keys and the second draws other numbers, and
    names of folders, by which finished trainings are found again, depend on both.
    """
    if config.method == "grid":
        lists = [choices if isinstance(choices, list) else _grid(choices) for choices in config.over.values()]
        grid = [dict(zip(config.over, values)) for values in itertools.product(*lists)]
        if config.budget is not None and len(grid) > config.budget:
            raise InputError(
                f'{where}: the grid has {len(grid)} combinations, the budget is {config.budget}: raise it, or choose method = "random"'
            )
        return grid
    if config.budget is None:
        raise InputError(f"{where}: sweep.budget is missing: how many combinations are to be drawn at random?")
    generator = random.Random(0)  # the same combinations for the same config
    sample: list[dict[str, Any]] = []
    for _ in range(100 * config.budget):
        drawn = {key: _draw(choices, generator) for key, choices in config.over.items()}
        if drawn not in sample:
            sample.append(drawn)
        if len(sample) == config.budget:
            break
    return sample


def _grid(interval: Range) -> list[float]:
    return [_round(interval.at(i / max(interval.count - 1, 1))) for i in range(interval.count)]


def _draw(choices: Sequence[Any] | Range, generator: random.Random) -> Any:
    return _round(choices.at(generator.random())) if isinstance(choices, Range) else generator.choice(list(choices))


def _round(value: float) -> float:
    """Four digits, so that names of folders stay short and the table shows what was trained."""
    return float(f"{value:.4g}")


def _set(settings: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        table = settings.get(name)
        if table is None:
            table = settings[name] = {}
        if not isinstance(table, dict):
            raise InputError(f"sweep.over.{key}: {name!r} is not a table")
        settings = table
    settings[last] = value


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _slug(name: str, slugs: dict[str, str]) -> str:
    """Name of a folder; `slugs` has the name that uses each, so that 1e-30 and 1e+30 do not share one."""
    slug = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)[:120]
    if slugs.setdefault(slug, name) != name:
        slug = f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return slug


__getattr__ = renamed_names(__name__, {"Row": "SweepRow"})
