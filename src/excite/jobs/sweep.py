"""A sweep: one training config with lists or ranges in it, every combination (or some, at random) trained and compared."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from excite._core.files import write_json
from excite.errors import InputError
from excite.jobs.executors import Engine
from excite.jobs.progress import Tally
from excite.jobs.scheduler import MarginsTaken, Measurement, Task, WorkStopped, complete
from excite.jobs.workspace import Place, find_place
from excite.margin import Margins
from excite.runs import Run, load_run
from excite.train.config import TrainConfig, parse_config, read_config
from excite.train.evaluate import PARTS, SavedModel, artifact_name

Count = Annotated[int, Field(ge=1)]


class Range(BaseModel):
    """Numbers between two; on a grid `count` of them, evenly spaced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    low: float
    high: float
    log: bool = False
    count: Count = 3

    def at(self, share: float) -> float:
        if not self.log:
            return self.low + share * (self.high - self.low)
        return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))


class SweepConfig(BaseModel):
    """The table [sweep] of a config.

    `over`: dotted keys of the training config, each with a list of values or a range. `metric`: "accuracy" (of test
    points), "margin" (their median margin), "gap" (of the margin curves), or the name of anything the run measures, taken
    at the end. `budget`: at most so many combinations; needed for "random".
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    over: dict[str, list[Any] | Range]
    metric: str = "accuracy"
    goal: Literal["max", "min"] | None = None
    method: Literal["grid", "random"] = "grid"
    budget: Count | None = None
    seeds: Count = 1
    points: Count | None = 200  # whose margins are measured, of training and test points each


@dataclass(frozen=True)
class Sweep:
    config: SweepConfig
    tasks: tuple[Task, ...]
    combinations: Mapping[str, Mapping[str, Any]]  # by arm
    place: Place

    @property
    def highest(self) -> bool:
        return self.config.goal != "min" and (self.config.goal == "max" or self.config.metric != "gap")


@dataclass(frozen=True)
class Row:
    """One combination: the metric of every seed that is finished."""

    name: str
    values: Mapping[str, Any]
    found: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.found)) if self.found else math.nan


@dataclass(frozen=True)
class SweepResult:
    """Rows from best to worst; `failed` says what could not be finished."""

    sweep: Sweep
    rows: tuple[Row, ...]
    folder: Path
    failed: str | None = None

    def __str__(self) -> str:
        keys = list(self.sweep.config.over)
        head = [*keys, f"{self.sweep.config.metric}, mean of seeds", "lowest", "highest", "seeds"]
        lines = [head]
        for row in self.rows:
            spread = [f"{min(row.found):.4g}", f"{max(row.found):.4g}"] if row.found else ["–", "–"]
            mean = f"{row.mean:.4g}" if row.found else "–"
            lines.append([*(_short(row.values[key]) for key in keys), mean, *spread, str(len(row.found))])
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def read_sweep(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Sweep:
    """The sweep in a .toml or .json file, its trainings into `folder`: a path, or a URL such as s3://bucket/sweep."""
    return plan(read_config(path), folder, str(path))


def plan(values: Mapping[str, Any], folder: str | os.PathLike[str], where: str = "config") -> Sweep:
    """Every training of a sweep; all configs are checked before one is started."""
    place = find_place(folder)
    base = {key: value for key, value in values.items() if key != "sweep"}
    try:
        config = SweepConfig.model_validate(values.get("sweep", {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{where}: sweep.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if not config.over or any(isinstance(given, list) and not given for given in config.over.values()):
        raise InputError(f"{where}: sweep.over: expected keys of the config, each with a list of values or a range")
    if "seed" in config.over or base.get("seed", 0) != 0:
        raise InputError(
            f"{where}: seed: every combination is trained with seeds 0 to sweep.seeds - 1: leave it out and set sweep.seeds"
        )
    for key, given in config.over.items():
        if isinstance(given, Range) and not (given.low < given.high and (not given.log or given.low > 0)):
            raise InputError(f"{where}: sweep.over.{key}: expected low < high, and low > 0 with log")
    combinations, tasks = {}, []
    slugs: dict[str, str] = {}
    measurement: Measurement = MarginsTaken(config.points, certify=False) if config.metric in TAKEN else Nothing()
    for chosen in _combinations(config, where):
        name = ", ".join(f"{key} {_short(value)}" for key, value in chosen.items())
        settings = copy.deepcopy(base)
        for key, value in chosen.items():
            _put(settings, key, value)
        for seed in range(config.seeds):
            parsed = parse_config({**settings, "seed": seed}, f"{where}, {name}")
            tasks.append(Task(name, seed, place.folder / f"{_slug(name, slugs)}-{seed}", parsed, measurement))
        combinations[name] = chosen
    return Sweep(config, tuple(tasks), combinations, place)


def run_sweep(
    sweep: Sweep,
    workers: int = 2,
    progress: Callable[[str, float, float], None] | None = None,
    engine: Engine | None = None,
    *,
    show: Callable[[Tally], None] | None = None,
    retries: int = 1,
) -> SweepResult:
    """Train what is not trained yet, compare, and write sweep.json. What fails is reported, with what is there.

    `progress` and `show` are told how far it is, and `retries` is for work without an engine: see `excite.jobs.scheduler.complete`.
    """
    place, failed = sweep.place, None
    with place.held():
        try:
            complete(sweep.tasks, workers, progress, engine, show=show, place=place, retries=retries)
        except WorkStopped as error:
            failed = str(error)
        place.gather(sweep.tasks)
        finished = [task for task in sweep.tasks if task.finished()]
        rows = [_row(sweep, name, finished) for name in sweep.combinations]
        sign = -1 if sweep.highest else 1
        rows.sort(key=lambda row: math.inf if math.isnan(row.mean) else sign * row.mean)
        found = [{"values": dict(row.values), sweep.config.metric: list(row.found)} for row in rows]
        write_json(place.folder / "sweep.json", {"sweep": sweep.config.model_dump(), "rows": found, "failed": failed})
    return SweepResult(sweep, tuple(rows), place.folder, failed)


def _row(sweep: Sweep, name: str, finished: Sequence[Task]) -> Row:
    mine = [task for task in finished if task.arm == name]
    return Row(name, sweep.combinations[name], tuple(_metric(task.folder, sweep.config.metric) for task in mine))


def _metric(folder: Path, metric: str) -> float:
    with load_run(folder) as run:
        if metric == "accuracy":
            return float(run.read_json("summary")["accuracy"]["test"])
        if metric in TAKEN:
            train, test = (Margins.from_dict(run.read_json(artifact_name("inf", part))) for part in PARTS)
            return float(test.median) if metric == "margin" else float(train.gap(test, resamples=1).value)
        if metric not in run.names():
            raise InputError(
                f"sweep.metric {metric!r} is not measured: expected {', '.join(TAKEN)} or one of {', '.join(run.names())}"
            )
        return float(run.series(metric)[1][-1])


TAKEN = ("accuracy", "margin", "gap")


@dataclass(frozen=True)
class Nothing:
    """No measurement beyond what the training itself writes."""

    def taken(self, run: Run, config: TrainConfig) -> bool:
        return True

    def take(self, saved: SavedModel, arm: str, progress: Callable[[float], None]) -> None:
        progress(1.0)


def _combinations(config: SweepConfig, where: str) -> list[dict[str, Any]]:
    keys = list(config.over)
    if config.method == "grid":
        lists = [given if isinstance(given, list) else _grid(given) for given in config.over.values()]
        found = [dict(zip(keys, values)) for values in itertools.product(*lists)]
        if config.budget is not None and len(found) > config.budget:
            raise InputError(
                f'{where}: the grid has {len(found)} combinations, the budget is {config.budget}: raise it, or choose method = "random"'
            )
        return found
    if config.budget is None:
        raise InputError(f"{where}: sweep.budget is missing: how many combinations are to be drawn at random?")
    drawn = random.Random(0)  # the same combinations for the same config
    found = []
    for _ in range(100 * config.budget):
        chosen = {key: _draw(given, drawn) for key, given in config.over.items()}
        if chosen not in found:
            found.append(chosen)
        if len(found) == config.budget:
            break
    return found


def _grid(given: Range) -> list[float]:
    return [_round(given.at(i / max(given.count - 1, 1))) for i in range(given.count)]


def _draw(given: Sequence[Any] | Range, drawn: random.Random) -> Any:
    return _round(given.at(drawn.random())) if isinstance(given, Range) else drawn.choice(list(given))


def _round(value: float) -> float:
    """Four digits: names of folders stay short, and what is trained is what is shown."""
    return float(f"{value:.4g}")


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        below = settings.get(part)
        if below is None:
            below = settings[part] = {}
        if not isinstance(below, dict):
            raise InputError(f"sweep.over.{key}: {part!r} is not a table")
        settings = below
    settings[last] = value


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _slug(name: str, taken: dict[str, str]) -> str:
    """A name of a folder; `taken` says whose each is, so that 1e-30 and 1e+30 do not share one."""
    slug = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)[:120]
    if taken.setdefault(slug, name) != name:
        slug = f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return slug
