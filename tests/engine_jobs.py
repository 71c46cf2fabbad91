"""Work for tests of engines: it sleeps, fails, or dies, and leaves a file in its folder. And the settings of a small sweep."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from excite.errors import InputError
from excite.jobs.job import Tell


@dataclass(frozen=True)
class Job:
    arm: str
    seed: int
    folder: Path
    seconds: float = 0.0

    def finished(self) -> bool:
        return (self.folder / "done").exists()

    def perform(self, tell: Tell) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "tries").open("a") as file:
            file.write(f"{os.getpid()}\n")
        print(f"at work on {self.arm}")
        tries = len((self.folder / "tries").read_text().split())
        if self.arm == "killed once" and tries == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.arm == "killed always":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.arm == "fails once" and tries == 1:
            raise RuntimeError("a passing failure")
        if self.arm == "fails always":
            raise RuntimeError("a failure that stays")
        if self.arm == "refused":
            raise InputError("radius: expected a number")
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            tell(self.folder.name, "sleeping", 1 - (end - time.monotonic()) / self.seconds)
            time.sleep(0.02)
        (self.folder / "done").write_text("done")
        tell(self.folder.name, "done", 1.0)


def jobs(folder: Path, *arms: str, seconds: float = 0.0) -> list[Job]:
    return [Job(arm, i, folder / f"{arm.replace(' ', '-')}-{i}", seconds) for i, arm in enumerate(arms)]


def tries_of(job: Job) -> int:
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
