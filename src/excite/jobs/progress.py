"""Progress of jobs: the message that every job and executor sends, and what is derived from it (counts, time left, tasks.json)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from excite._core.files import write_json, writing
from excite.errors import ExciteError

if TYPE_CHECKING:
    from excite.jobs.job import Job

# No module that this one imports loads torch: on a cluster the process of `LatestProgress` starts fast.

FILE, FORMAT = "tasks.json", "excite-tasks"
Status = Literal["waiting", "running", "done", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)
_WRITE_INTERVAL = 1.0  # seconds between two versions of the file
_UPLOAD_INTERVAL = 10.0
_MIN_FRACTION = 0.05  # of one job, before the time left is estimated


@dataclass(frozen=True)
class JobProgress:
    """How far one job is. Every progress callback of this package is called with one of these.

    Args:
        name: Name of the job: that of its folder.
        phase: What it is doing, such as "training".
        fraction: Fraction done, from 0 to 1.
        status: "waiting" (also for another try), "running", "done" or "failed".
        reason: For a failed job, the error in one line.
        log: For a failed job, the file or URL of its output.

    Example:
        >>> JobProgress("plain-0", "training", 0.5).status
        'running'
    """

    name: str
    phase: str = ""
    fraction: float = 0.0
    status: Status = "running"
    reason: str | None = None
    log: str | None = None


ProgressCallback = Callable[[JobProgress], None]


def done(name: str) -> JobProgress:
    """The last message of a job that succeeded."""
    return JobProgress(name, "done", 1.0, "done")


class ProgressTracker:
    """The latest progress of every job; `update` is an `ProgressCallback` callback.

    Jobs whose first message says "done" were finished before; they do not count for the estimate of the time left.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.jobs: dict[str, JobProgress] = {}
        self.finished_before: set[str] = set()
        self._clock, self._start = clock, clock()

    def update(self, progress: JobProgress) -> None:
        """Records a message; those that arrive after a job has ended are ignored."""
        latest = self.jobs.get(progress.name)
        if latest is None and progress.status == "done":
            self.finished_before.add(progress.name)
        if latest is None or latest.status not in ("done", "failed"):  # messages from other machines may arrive late
            self.jobs[progress.name] = replace(progress, fraction=max(0.0, min(1.0, progress.fraction)))

    def count(self, status: Status) -> int:
        """Number of jobs with a status."""
        return len(self.with_status(status))

    def with_status(self, status: Status) -> list[JobProgress]:
        """The latest progress of the jobs with a status."""
        return [job for job in self.jobs.values() if job.status == status]

    @property
    def done(self) -> float:
        """Number of jobs done; a running one counts by its fraction."""
        return sum(job.fraction for job in self.jobs.values())

    def seconds_left(self) -> float | None:
        """Estimate from the pace so far; None before a twentieth of a job is done."""
        completed = sum(job.fraction for job in self.jobs.values() if job.name not in self.finished_before)
        remaining = sum(1 - job.fraction for job in self.jobs.values() if job.status in ("waiting", "running"))
        return remaining * (self._clock() - self._start) / completed if completed >= _MIN_FRACTION else None

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status in STATUSES[1:] if (n := self.count(status)))
        remaining = self.seconds_left() if self.count("waiting") + self.count("running") else None
        ending = "" if remaining is None else f", {_duration(remaining)} left"
        return f"{len(self.jobs)} jobs: {counts or 'none started'}{ending}"


def with_tracker(callback: Callable[[ProgressTracker], None]) -> ProgressCallback:
    """An `ProgressCallback` callback that passes the state of all jobs, as earlier versions did."""
    tracker = ProgressTracker()

    def on_progress(progress: JobProgress) -> None:
        tracker.update(progress)
        callback(tracker)

    return on_progress


def count_jobs(callback: Callable[[str, float, float], None]) -> ProgressCallback:
    """An `ProgressCallback` callback that passes a text, the jobs done and all jobs, as earlier versions did."""
    tracker = ProgressTracker()

    def on_progress(progress: JobProgress) -> None:
        tracker.update(progress)
        callback(f"{progress.phase or progress.status} {progress.name}", tracker.done, len(tracker.jobs))

    return on_progress


class ProgressFile:
    """Writes the progress of all jobs to tasks.json beside the runs, for the live page.

    Args:
        tracker: The progress to write.
        jobs: The jobs it tracks.
        folder: Where tasks.json is written.
        upload: Called with the name of the file, at longer intervals, to copy it to a store.
    """

    def __init__(
        self, tracker: ProgressTracker, jobs: Sequence[Job], folder: Path, upload: Callable[[str], None] | None = None
    ) -> None:
        self.tracker, self.jobs, self.path, self.upload = tracker, jobs, folder / FILE, upload
        self._next_write, self._next_upload = 0.0, 0.0

    def write(self, ended: bool = False) -> None:
        """Writes the file unless it was written less than a second ago; always if all jobs have `ended`."""
        now = time.monotonic()
        if now < self._next_write and not ended:
            return
        self._next_write = now + _WRITE_INTERVAL
        with suppress(ExciteError):  # jobs continue without the file
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self._content(ended))
            if self.upload is not None and (ended or now >= self._next_upload):
                self._next_upload = now + _UPLOAD_INTERVAL
                self.upload(FILE)

    def _content(self, ended: bool) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "updated": time.time(),
            "ended": ended,
            "seconds_left": self.tracker.seconds_left(),
            "tasks": [self._entry(job) for job in self.jobs],
        }

    def _entry(self, job: Job) -> dict[str, Any]:
        """One job, with the keys that earlier versions read."""
        from excite.jobs.logs import log_path

        name = job.folder.name
        progress = self.tracker.jobs.get(name, JobProgress(name, status="waiting"))
        return {
            "name": name,
            "arm": job.variant,
            "seed": job.seed,
            "log": log_path(job),
            "state": progress.status,
            "phase": progress.phase,
            "share": progress.fraction,
            "reason": progress.reason,
            "found": name in self.tracker.finished_before,
        }


class LatestProgress:
    """The latest message of every job since the last `drain`: an actor on a cluster, to which its nodes write."""

    def __init__(self) -> None:
        self._latest: dict[str, JobProgress] = {}

    def put(self, progress: JobProgress) -> None:
        """Replaces the message of a job."""
        self._latest[progress.name] = progress

    def drain(self) -> list[JobProgress]:
        """Returns the messages and forgets them."""
        messages, self._latest = list(self._latest.values()), {}
        return messages


def _duration(seconds: float) -> str:
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    return f"{total // 60} min" if total < 3600 else f"{total // 3600} h {total % 3600 // 60} min"
