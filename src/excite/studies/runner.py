"""Run a study: train what is missing, measure, judge the claims, draw the figure, write it all down."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from excite._core.checks import check_count, check_number
from excite._core.compatibility import converted_keywords, renamed_keywords
from excite._core.files import write_bytes, write_json, writing
from excite.errors import InputError, TrainingStopped
from excite.jobs.executors import Executor
from excite.jobs.job import Job
from excite.jobs.progress import JobProgress, ProgressCallback, count_jobs, with_tracker
from excite.jobs.scheduler import run_jobs
from excite.jobs.training_job import TrainingJob
from excite.jobs.workspace import find_workspace
from excite.runs.checkpoints import find as find_checkpoints
from excite.studies.earlier import EarlierNumbers, fingerprint, take_earlier
from excite.studies.figures import save
from excite.studies.find import find_study
from excite.studies.judging.verdicts import Verdict, judge_all
from excite.studies.page import page, table
from excite.studies.study import Scale, Study, VariantResult
from excite.train.from_config import find_device

_VERSIONS = ("excite", "python", "torch", "numpy")


@dataclass(frozen=True)
class StudyResult:
    """Result of a study. Its files are in `folder`: runs, figure.png and .svg, numbers.json, results.md.

    Attributes:
        study: The study.
        scale: Name of the scale.
        seeds: The seeds.
        numbers: Results of each variant and seed.
        verdicts: One verdict per claim.
        folder: Folder of the files.
        command: Command that runs the study again.
        versions: Versions of Excite and of the packages it uses.
        seconds: What all jobs took, if one call has run them all.
        missing: Variants and seeds that are not finished, of a study that was stopped.
        earlier: Variants and seeds whose numbers were taken from an earlier numbers.json.

    Example:
        >>> result = excite.studies.run("margin-losses")  # trains for minutes, on CIFAR-10  # doctest: +SKIP
        >>> print(result.verdicts[0])  # doctest: +SKIP
    """

    study: Study
    scale: str
    seeds: tuple[int, ...]
    numbers: tuple[VariantResult, ...]
    verdicts: tuple[Verdict, ...]
    folder: Path
    command: str
    versions: dict[str, str]
    seconds: float | None = None
    missing: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()

    @property
    def figure(self) -> Path:
        """Path of the first figure."""
        return self.folder / "figure.png"

    @property
    def flags(self) -> list[str]:
        """Evidence against the margins, by variant; one line per kind of evidence."""
        return sorted({f"{result.variant}, {flag}" for result in self.numbers for flag in result.flags})

    def __str__(self) -> str:
        rows = table(self.numbers, self.study.method.columns)
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *map(str, self.verdicts)])


class OutOfTime(TrainingStopped):
    """Jobs of a study are left when its time is up; the same call continues.

    Attributes:
        states: State of each job by the name of its folder: "done", "not started", or what is stored of it.
    """

    def __init__(self, states: Mapping[str, str]) -> None:
        finished = sum(state == "done" for state in states.values())
        super().__init__(f"{finished} of {len(states)} jobs are finished and stored; the same command continues")
        self.states = dict(states)


@renamed_keywords(arms="variants", engine="executor")
@converted_keywords(progress=("on_progress", count_jobs), show=("on_progress", with_tracker))
def run(
    name: str | os.PathLike[str] | Study, scale: str = "quick", seeds: int | None = None, out: str |
    os.PathLike[str] | None = None, device: str | None = None, workers: int = 2, on_progress: ProgressCallback |
    None = None, *, variants: str | None = None, docs: str | os.PathLike[str] | None = None, executor: Executor |
    None = None, retries: int = 1, seconds: float | None = None, numbers: str | os.PathLike[str] | None = None,
) -> StudyResult:  # fmt: skip
    """Run a study of the papers, or what is left of it: finished training runs are not done again, also those of other studies.

    Args:
        name: one of `STUDIES`, a paper and figure such as "persistency:6", the path of a file that defines `STUDY`, or a study.
        scale: "quick" or "paper".
        seeds: how many; the scale's own number by default.
        out: folder or URL (s3://bucket/study) for runs, figure, numbers.json and results.md; runs/studies/NAME-SCALE by default.
        device: "cpu", "cuda"; by default the GPU for scale "paper" if there is one.
        workers: training runs side by side on the CPU.
        on_progress: called with a `JobProgress` whenever a job changes.
        variants: "figure" for the curves of the papers' figure, "all" for the others too; by default all at scale "paper".
        docs: also write the results page and its images into this folder.
        executor: runs the jobs, from `excite.jobs.executors.find_executor`; by default this process and its workers.
        retries: without an executor, how often a job is started again after an error that may be transient.
        seconds: stop after about this time, with a checkpoint of each training; the next call continues. Jobs are then taken seed
            by seed, and results of what is finished are written once every variant has a seed. 0 runs nothing.
        numbers: a numbers.json or published NAME.json of the study, whose training runs with the same settings are not done again.

    Returns:
        Numbers, verdicts and the folder of the files.

    Raises:
        InputError: If there is no such study or scale, or an argument is not what is expected.
        OutOfTime: If jobs are left after `seconds`.
        DataError: If a data set is not downloaded.

    Example:
        >>> excite.studies.run("margin-losses", scale="quick", seeds=2)  # trains for minutes, on CIFAR-10  # doctest: +SKIP
    """
    study = find_study(name)
    size = find_scale(study, scale)
    count = size.seeds if seeds is None else _count(seeds)
    chosen = _which(study, size, variants)
    seconds = None if seconds is None else check_number(seconds, "seconds", 0)
    workspace = find_workspace(out if out is not None else Path("runs/studies") / f"{study.name}-{size.name}")
    folder = workspace.folder
    jobs = plan_jobs(study, size, count, folder, _device(device, size), chosen == "all")
    study.method.check(jobs)
    with workspace.lock():
        if out is None and workspace.store is None:
            _take_over(jobs, folder.parent.glob(f"*-{size.name}"))
        earlier = take_earlier(study, size.name, jobs, numbers)
        left = [job for job in jobs if earlier.of(job) is None]
        complete, start = not any(job.finished() for job in jobs) and left == jobs, time.monotonic()
        options: dict[str, Any] = {"executor": executor, "workspace": workspace, "retries": retries}
        stopped = _run_within(seconds, left, workers, on_progress, **options)
        taken = time.monotonic() - start if complete and stopped is None else _earlier_seconds(folder, len(jobs))
        workspace.download(left)
        if ready := jobs if stopped is None else _finished_part(jobs, earlier):
            result, details = _collect(study, size, ready, folder, _command(study, size, count, chosen), earlier)
            result = dataclasses.replace(result, seconds=taken, missing=_missing(jobs, ready))
            _write(result, details, Path(docs) if docs is not None else None)
    if stopped is not None:
        raise stopped
    return result


def _device(device: str | None, scale: Scale) -> str:
    """The requested device, or by default the GPU for scale "paper" if there is one."""
    if device is None:
        device = "cuda" if scale.name == "paper" and torch.cuda.is_available() else "cpu"
    find_device(device)
    return device


def _run_within(
    seconds: float | None, jobs: list[Job], workers: int, on_progress: ProgressCallback | None, **options: Any
) -> OutOfTime | None:
    """Runs jobs; with `seconds` seed by seed until the time is up: training runs under way end after their step, with a checkpoint."""
    if seconds is None:
        run_jobs(jobs, workers, on_progress, **options)
        return None
    end = time.monotonic() + seconds

    def on_change(progress: JobProgress) -> None:
        if on_progress is not None:
            on_progress(progress)
        if progress.status == "running" and time.monotonic() >= end:  # before a job starts, and between its steps
            raise KeyboardInterrupt

    try:
        run_jobs(sorted(jobs, key=lambda job: job.seed), workers, on_change, **options)
    except KeyboardInterrupt:
        if time.monotonic() < end:
            raise
        return OutOfTime({job.folder.name: _state(job) for job in jobs})
    return None


def _finished_part(jobs: Sequence[Job], earlier: EarlierNumbers) -> list[Job]:
    """The finished jobs, if there is at least one of every variant; else none."""
    finished = [job for job in jobs if earlier.of(job) is not None or job.finished()]
    return finished if {job.variant for job in finished} == {job.variant for job in jobs} else []


def _missing(jobs: Sequence[Job], ready: Sequence[Job]) -> tuple[str, ...]:
    return tuple(f"{job.variant} (seed {job.seed})" for job in jobs if job not in ready)


def _state(job: Job) -> str:
    """How far a job is, by what its folder holds."""
    if job.finished():
        return "done"
    checkpoints = find_checkpoints(job.folder / "checkpoints")
    if checkpoints:
        return f"trained to step {checkpoints[-1].step:,}"
    return "begun" if job.folder.exists() else "not started"


def plan_jobs(
    study: Study, scale: Scale, seeds: int, folder: Path, device: str = "cpu", extra: bool = False
) -> list[Job]:
    """Everything a study has to do, variant by variant."""
    return [
        study.method.job(study.name, variant, scale, seed, folder / f"{variant.slug}-{seed}", device)
        for variant in study.variants(scale)
        if extra or not variant.extra
        for seed in range(seeds)
    ]


def _take_over(jobs: list[Job], studies: Iterable[Path]) -> None:
    """Copy what another study has trained and measured in the same way: variants such as plain training stand in several."""
    others = [path for study in studies for path in study.iterdir() if (path / "run.json").exists()]
    for job in jobs:
        if isinstance(job, TrainingJob) and not job.folder.exists():
            alike = (dataclasses.replace(job, folder=path) for path in others if path.name.endswith(f"-{job.seed}"))
            folder = next((other.folder for other in alike if other.finished()), None)
            if folder is not None:
                with writing(job.folder):
                    shutil.copytree(folder, job.folder)


def _earlier_seconds(folder: Path, jobs: int) -> float | None:
    """Seconds that the same jobs took in an earlier call, None if not known."""
    try:
        stored = json.loads((folder / "numbers.json").read_text())
        return float(stored["seconds"]) if len(stored["numbers"]) == jobs else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_scale(study: Study, scale: str) -> Scale:
    """Returns a scale of a study by name, or raises an InputError."""
    if scale not in study.scales:
        raise InputError(f"scale: expected {' or '.join(map(repr, study.scales))}; got {scale!r}")
    result: Scale = study.scales[scale]
    return result


def _count(seeds: object) -> int:
    return check_count(seeds, "seeds")


def _which(study: Study, scale: Scale, variants: str | None) -> str:
    if variants not in (None, "figure", "all"):
        raise InputError(f"variants: expected 'figure' or 'all'; got {variants!r}")
    extra = any(variant.extra for variant in study.variants(scale))
    return variants or ("all" if extra and scale.every_variant else "figure")


def _collect(
    study: Study, scale: Scale, jobs: list[Job], folder: Path, command: str, earlier: EarlierNumbers
) -> tuple[StudyResult, dict[str, list[Any]]]:
    numbers: list[VariantResult] = []
    details: dict[str, list[Any]] = {}
    for job in jobs:
        stored = earlier.of(job)
        number, detail = study.method.read(job) if stored is None else (stored, stored.curves)
        numbers.append(dataclasses.replace(number, settings=fingerprint(job)))
        details.setdefault(job.variant, []).append(detail)
    if (combine := getattr(study.method, "combine", None)) is not None:
        numbers = combine(numbers, details)
    verdicts = judge_all(study.claims(scale), numbers)
    seeds = tuple(sorted({job.seed for job in jobs}))
    taken = tuple(f"{job.variant} (seed {job.seed})" for job in jobs if earlier.of(job) is not None)
    versions = _versions([job for job in jobs if earlier.of(job) is None], earlier)
    result = StudyResult(study, scale.name, seeds, tuple(numbers), tuple(verdicts), folder, command, versions)
    return dataclasses.replace(result, earlier=taken), details


def _versions(jobs: list[Job], earlier: EarlierNumbers) -> dict[str, str]:
    """Versions of the packages and the machine that the numbers were computed with."""
    result: dict[str, dict[str, None]] = {
        name: dict.fromkeys(value.split(", ")) for name, value in earlier.versions.items()
    }
    for job in jobs:
        made = json.loads((job.folder / "environment.json").read_text())
        for name in _VERSIONS:
            if name in made:
                result.setdefault(name, {})[str(made[name])] = None
        for device in made.get("devices") or ["CPU"]:
            result.setdefault("on", {})[str(device)] = None
    return {name: ", ".join(values) for name, values in result.items()}


def _write(result: StudyResult, details: dict[str, list[Any]], docs: Path | None) -> None:
    study, folder = result.study, result.folder
    scale = study.scales[result.scale]
    stem = f"{study.name}-{scale.name}" if scale.own_page else study.name  # of the page in the documentation
    drawn = study.method.figures(study, scale, details, result.numbers)
    first = next(iter(drawn))
    places = [(folder, "results.md", {name: name for name in drawn})]
    if docs is not None:
        tail = {name: "" if name == first else f"-{name}" for name in drawn}
        places.append((docs, f"{stem}.md", {name: f"images/{stem}{tail[name]}" for name in drawn}))
    for place, text, names in places:
        for name, (_, figure) in drawn.items():
            save(figure, place / names[name], "png", *(["svg"] if place == folder else []))
        images = {name: (sentence, f"{names[name]}.png") for name, (sentence, _) in drawn.items()}
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
        write_bytes(place / text, page(result, images, place == docs).encode())
    settings = {variant.name: variant.config for variant in study.variants(scale) if variant.name in details}
    numbers = {
        "study": study.name,
        "scale": result.scale,
        "figure": study.figure,
        "command": result.command,
        "verdicts": [verdict.plain() for verdict in result.verdicts],
        "numbers": [result.plain() for result in result.numbers],
        "settings": {"scale": scale.plain(), "seeds": result.seeds, "arms": settings},
        "versions": result.versions,
        "seconds": None if result.seconds is None else round(result.seconds, 1),
        **({"missing": result.missing} if result.missing else {}),
        **({"earlier": result.earlier} if result.earlier else {}),
    }
    write_json(folder / "numbers.json", numbers)
    if docs is not None:
        write_bytes(docs / f"{stem}.json", published_numbers(numbers))


def published_numbers(numbers: dict[str, Any]) -> bytes:
    """The JSON file beside a results page: numbers and verdicts, one per line, without settings; `excite study judge` reads it."""
    lists = {key: numbers[key] for key in ("numbers", "verdicts")}
    others = {key: value for key, value in numbers.items() if key not in (*lists, "settings")}
    entries_by_key = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in others.items()]
    for key, entries in lists.items():
        lines = ",\n".join(f"  {json.dumps(_rounded(entry), ensure_ascii=False)}" for entry in entries)
        entries_by_key.append(f" {json.dumps(key)}: [\n{lines}\n ]")
    return ("{\n" + ",\n".join(entries_by_key) + "\n}\n").encode()


def _rounded(entry: dict[str, Any]) -> dict[str, Any]:
    """Numbers to eight digits: small files, and verdicts as before."""
    return {key: float(f"{value:.8g}") if isinstance(value, float) else value for key, value in entry.items()}


def _command(study: Study, scale: Scale, seeds: int, variants: str) -> str:
    arguments = ["excite study run", shlex.quote(study.origin or study.name), "--scale", scale.name]
    if seeds != scale.seeds:
        arguments += ["--seeds", str(seeds)]
    if variants != _which(study, scale, None):
        arguments += ["--variants", variants]
    return " ".join(arguments)
