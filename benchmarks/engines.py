"""What an engine adds to the work: 40 tasks of one second each on two workers, over the ideal 20 seconds.

    python -m benchmarks.engines [--on local] [--tasks 40] [--seconds 1] [--workers 2]

`--on` is local, ray or ray:ADDRESS. Tasks sleep and tell how far they are, a hundred times each; the whole way of a sweep
is taken: state of all tasks, logs, tasks.json. Three times are given: from the start of the first task, when the workers are
up; from the call (local workers import torch while this process does; on Ray they begin now, after a look at every node); of the
whole command with its own imports. Ray itself is up before the call.
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
class Nap:
    variant: str
    seed: int
    folder: Path
    seconds: float

    def finished(self) -> bool:
        return (self.folder / "times").exists()

    def run(self, on_progress: ProgressCallback) -> None:
        begun, clock = time.time(), time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        while (spent := time.monotonic() - clock) < self.seconds:
            on_progress(JobProgress(self.folder.name, "sleeping", spent / self.seconds))
            time.sleep(min(self.seconds / 100, self.seconds - spent))
        (self.folder / "times").write_text(f"{begun} {time.time()}")
        on_progress(done(self.folder.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="local")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.time()
    preload(options.on, options.workers)  # as the command line does, before anything heavy is imported
    from benchmarks.timing import machine
    from excite.jobs.executors import find_executor
    from excite.jobs.scheduler import run_jobs

    kind, _, address = options.on.partition(":")
    if kind == "ray":
        import ray

        quiet = {"log_to_driver": False, "logging_level": "error"}
        ray.init(address=address, **quiet) if address else ray.init(
            num_cpus=options.workers, include_dashboard=False, **quiet
        )
    executor = find_executor(options.on, options.workers)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Nap("nap", i, Path(folder) / f"nap-{i}", options.seconds) for i in range(options.tasks)]
        begun = time.time()
        run_jobs(jobs, options.workers, executor=executor)
        whole = time.time() - begun
        times = [tuple(map(float, (job.folder / "times").read_text().split())) for job in jobs]
    ideal = -(-options.tasks // options.workers) * options.seconds
    working = begun + whole - min(start for start, _ in times)
    print(f"## Engines\n\n{machine()}\n")
    print(f"{options.tasks} tasks of {options.seconds:g} s on {options.workers} workers, `--on {options.on}`.\n")
    print("| | seconds | over the ideal |\n| --- | --- | --- |")
    for name, seconds in (
        ("ideal", ideal),
        ("from the first task", working),
        ("from the call", whole),
        ("whole command", begun + whole - started),
    ):
        print(f"| {name} | {seconds:.2f} | {100 * (seconds / ideal - 1):+.1f} % |")


if __name__ == "__main__":
    main()
