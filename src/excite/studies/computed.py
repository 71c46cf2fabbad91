"""Studies whose variants are functions: settings and a seed in, numbers out. Small experiments that need no run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from excite._core.files import write_json, writing
from excite.data import load
from excite.errors import RunError
from excite.jobs.job import Job
from excite.jobs.progress import JobProgress, ProgressCallback, done
from excite.runs.environment import environment
from excite.studies.study import Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class StepsScale(Scale):
    """A scale with a number of training steps."""

    steps: int


OnProgress = Callable[[float], None]  # called with the fraction that is done


@dataclass(frozen=True)
class Outcome:
    """Result of one variant and one seed. `detail` holds the data of figures, ready for JSON."""

    values: Mapping[str, float]
    detail: Any = None
    flags: tuple[str, ...] = ()


# (settings of the variant, seed, progress) -> outcome; a function of a module, so that worker processes find it
Compute = Callable[[Mapping[str, Any], int, OnProgress], Outcome]
# The same for several pairs of settings and seed at once, on a device; outcomes in their order.
ComputeAll = Callable[[Sequence[tuple[Mapping[str, Any], int]], str, OnProgress], Sequence[Outcome]]
# (settings, seed, device, folder for what is kept between calls, progress) -> outcome
ComputeLong = Callable[[Mapping[str, Any], int, str, Path, OnProgress], Outcome]
Draw = Callable[[Study, Any, Mapping[str, list[Any]], Sequence[VariantResult]], "dict[str, tuple[str, Figure]]"]


@dataclass(frozen=True)
class Jointly:
    """Variants and seeds that are computed at once, such as networks of one ensemble."""

    compute: ComputeAll


@dataclass(frozen=True)
class Resumable:
    """Variants that take long: they store their progress in their folder and continue from it."""

    compute: ComputeLong


@dataclass(frozen=True)
class StoredComputation:
    """Its folder holds result.json and environment.json once it is done."""

    variant: str
    seed: int
    folder: Path
    settings: Mapping[str, Any]

    def finished(self) -> bool:
        """Whether the folder holds a result for these settings."""
        try:
            stored = json.loads((self.folder / "result.json").read_text())
            return bool(stored["settings"] == json.loads(json.dumps(dict(self.settings))))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self, outcome: Outcome) -> None:
        """Writes the result and the environment to the folder."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "environment.json", environment())
        write_json(
            self.folder / "result.json",
            {
                "settings": dict(self.settings),
                "values": dict(outcome.values),
                "detail": outcome.detail,
                "flags": outcome.flags,
            },
        )


def _computing(jobs: Sequence[StoredComputation], on_progress: ProgressCallback) -> OnProgress:
    """A callback for the fraction done, passed on as the progress of each job."""

    def on_fraction(fraction: float) -> None:
        for job in jobs:
            on_progress(JobProgress(job.folder.name, "computing", fraction))

    return on_fraction


@dataclass(frozen=True)
class Computation(StoredComputation):
    """A computation of one variant and seed."""

    compute: Compute

    def run(self, on_progress: ProgressCallback) -> None:
        """Computes and writes the result."""
        self.write(self.compute(self.settings, self.seed, _computing([self], on_progress)))
        on_progress(done(self.folder.name))


@dataclass(frozen=True)
class JointComputation(StoredComputation):
    """A computation that can be done for several variants and seeds at once."""

    compute: ComputeAll
    device: str

    def run(self, on_progress: ProgressCallback) -> None:
        """Computes and writes the result."""
        self.run_jointly([], on_progress)

    def run_jointly(self, others: Sequence[JointComputation], on_progress: ProgressCallback) -> None:
        """Computes this and other results at once and writes them."""
        all_jobs = [self, *others]
        outcomes = self.compute(
            [(job.settings, job.seed) for job in all_jobs], self.device, _computing(all_jobs, on_progress)
        )
        for job, outcome in zip(all_jobs, outcomes, strict=True):
            job.write(outcome)
            on_progress(done(job.folder.name))


@dataclass(frozen=True)
class LongComputation(StoredComputation):
    """A computation that stores its progress and can be continued."""

    compute: ComputeLong
    device: str

    def run(self, on_progress: ProgressCallback) -> None:
        """Computes and writes the result."""
        self.write(self.compute(self.settings, self.seed, self.device, self.folder, _computing([self], on_progress)))
        on_progress(done(self.folder.name))


@dataclass(frozen=True)
class Computed:
    """The method of such a study.

    Args:
        compute: Function of the settings of a variant, a seed and a progress callback that returns an `Outcome`; in `Jointly` or
            `Resumable` where it takes other arguments.
        columns: Columns of the table by the name of the value: heading and format, such as ("distance", "{:.3f}").
        draw: Returns the figures by name, each with its caption.
        below_figure: Text below the figure: what is drawn.
        words: Text below the table: what its columns are.
        settings: Sentences for the section "Settings" of the results page.
        data: Data sets that have to be there.
        combine: Function of all results and of their details by variant that returns the results, where some of their values depend
            on all runs, such as thresholds tuned on some of them.
        chance: Networks with a test accuracy (`accuracy_test`) below this decide hardly better than by chance.
    """

    compute: Compute | Jointly | Resumable
    columns: Mapping[str, tuple[str, str]]
    draw: Draw
    below_figure: str
    words: str
    settings: tuple[str, ...] = ()
    data: tuple[str, ...] = field(default=())
    combine: Callable[[Sequence[VariantResult], Mapping[str, Sequence[Any]]], list[VariantResult]] | None = None
    chance: float = 0.0

    def job(self, study: str, variant: Variant, scale: Any, seed: int, folder: Path, device: str) -> Job:
        """Makes the job of one variant and seed."""
        if isinstance(self.compute, Jointly):
            return JointComputation(variant.name, seed, folder, variant.config, self.compute.compute, device)
        if isinstance(self.compute, Resumable):
            return LongComputation(variant.name, seed, folder, variant.config, self.compute.compute, device)
        return Computation(variant.name, seed, folder, variant.config, self.compute)

    def check(self, jobs: Sequence[Job]) -> None:
        """Checks that the data are available, before anything is trained."""
        for name in self.data:
            load(name, classes=(0, 1))  # says how to fetch what is not there

    def read(self, job: Job) -> tuple[VariantResult, Any]:
        """Reads the result of a finished job."""
        try:
            stored = json.loads((job.folder / "result.json").read_text())
            values = {name: float("nan") if value is None else float(value) for name, value in stored["values"].items()}
            by_chance = values.get("accuracy_test", 1.0) < self.chance
            return VariantResult(job.variant, job.seed, values, tuple(stored["flags"]), by_chance), stored["detail"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{job.folder / 'result.json'} is damaged ({error!r}): delete it and start again") from error

    def figures(
        self, study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        """Draws the figures of the study."""
        return self.draw(study, scale, details, numbers)

    def below_table(self, scale: Any) -> str:
        """Text below the table of results."""
        return self.words
