"""Job for tests of engines: it sleeps, fails, or dies, and leaves a file in its folder. And the settings of a small sweep."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from excite.errors import InputError
from excite.jobs.progress import JobProgress, ProgressCallback, done


@dataclass(frozen=True)
class SleepJob:
    variant: str
    seed: int
    folder: Path
    seconds: float = 0.0

    def finished(self) -> bool:
        return (self.folder / "done").exists()

    def run(self, on_progress: ProgressCallback) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "tries").open("a") as file:
            file.write(f"{os.getpid()}\n")
        print(f"at work on {self.variant}")
        tries = len((self.folder / "tries").read_text().split())
        if self.variant == "killed once" and tries == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.variant == "killed always":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.variant == "fails once" and tries == 1:
            raise RuntimeError("a passing failure")
        if self.variant == "fails always":
            raise RuntimeError("a failure that stays")
        if self.variant == "refused":
            raise InputError("radius: expected a number")
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            on_progress(JobProgress(self.folder.name, "sleeping", 1 - (end - time.monotonic()) / self.seconds))
            time.sleep(0.02)
        (self.folder / "done").write_text("done")
        on_progress(done(self.folder.name))


def jobs(folder: Path, *variants: str, seconds: float = 0.0) -> list[SleepJob]:
    return [
        SleepJob(variant, i, folder / f"{variant.replace(' ', '-')}-{i}", seconds) for i, variant in enumerate(variants)
    ]


def tries_of(job: SleepJob) -> int:
    return len((job.folder / "tries").read_text().split())


def settings(**sweep: Any) -> dict[str, Any]:
    """Two trainings of a second; `sweep` goes into their table [sweep]."""
    return {
        "data": {"name": "moons", "train": 40, "test": 40},
        "model": {"name": "mlp", "options": {"widths": [8]}},
        "optimizer": {"name": "sgd", "lr": 0.5},
        "epochs": 3, "batch": 10, "watch": False,
        "sweep": {"over": {"optimizer.lr": [0.001, 0.5]}, "metric": "accuracy/test", **sweep},
    }  # fmt: skip
