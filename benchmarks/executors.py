"""Overhead of an executor: 40 jobs of one second each on two workers, compared with the ideal 20 seconds.

    python -m benchmarks.executors [--on local] [--jobs 40] [--seconds 1] [--workers 2]

`--on` is local, ray or ray:ADDRESS. The jobs sleep and report progress a hundred times each, through everything that a sweep
uses: state of all jobs, logs, tasks.json. Three times are printed: from the start of the first job, when the workers are
up; from the call (local workers import torch while this process does; on Ray they start then, after a check of every node);
of the whole command with its own imports. Ray itself is started before the call.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from excite.jobs.preload import preload
from excite.jobs.progress import JobProgress, done

if TYPE_CHECKING:
    from excite.jobs.progress import ProgressCallback


@dataclass(frozen=True)
class SleepJob:
    variant: str
    seed: int
    folder: Path
    seconds: float

    def finished(self) -> bool:
        return (self.folder / "times").exists()

    def run(self, on_progress: ProgressCallback) -> None:
        start, clock = time.time(), time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        while (spent := time.monotonic() - clock) < self.seconds:
            on_progress(JobProgress(self.folder.name, "sleeping", spent / self.seconds))
            time.sleep(min(self.seconds / 100, self.seconds - spent))
        (self.folder / "times").write_text(f"{start} {time.time()}")
        on_progress(done(self.folder.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="local")
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.time()
    preload(options.on, options.workers)  # as the command line does, before anything heavy is imported
    from benchmarks.timing import machine
    from excite.jobs.executors import find_executor
    from excite.jobs.scheduler import run_jobs

    name, _, address = options.on.partition(":")
    if name == "ray":
        import ray

        quiet = {"log_to_driver": False, "logging_level": "error"}
        ray.init(address=address, **quiet) if address else ray.init(
            num_cpus=options.workers, include_dashboard=False, **quiet
        )
    executor = find_executor(options.on, options.workers)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [SleepJob("sleep", i, Path(folder) / f"sleep-{i}", options.seconds) for i in range(options.jobs)]
        call = time.time()
        run_jobs(jobs, options.workers, executor=executor)
        whole = time.time() - call
        times = [tuple(map(float, (job.folder / "times").read_text().split())) for job in jobs]
    ideal = -(-options.jobs // options.workers) * options.seconds
    working = call + whole - min(start for start, _ in times)
    print(f"## Executors\n\n{machine()}\n")
    print(f"{options.jobs} jobs of {options.seconds:g} s on {options.workers} workers, `--on {options.on}`.\n")
    print("| | seconds | over the ideal |\n| --- | --- | --- |")
    for label, seconds in (
        ("ideal", ideal),
        ("from the first job", working),
        ("from the call", whole),
        ("whole command", call + whole - started),
    ):
        print(f"| {label} | {seconds:.2f} | {100 * (seconds / ideal - 1):+.1f} % |")


if __name__ == "__main__":
    main()
