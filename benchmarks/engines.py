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

from excite.jobs.preload import warm

if TYPE_CHECKING:
    from excite.jobs.job import Tell


@dataclass(frozen=True)
class Nap:
    arm: str
    seed: int
    folder: Path
    seconds: float

    def finished(self) -> bool:
        return (self.folder / "times").exists()

    def perform(self, tell: Tell) -> None:
        begun, clock = time.time(), time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        while (spent := time.monotonic() - clock) < self.seconds:
            tell(self.folder.name, "sleeping", spent / self.seconds)
            time.sleep(min(self.seconds / 100, self.seconds - spent))
        (self.folder / "times").write_text(f"{begun} {time.time()}")
        tell(self.folder.name, "done", 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="local")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.time()
    warm(options.on, options.workers)  # as the command line does, before anything heavy is imported
    from benchmarks.timing import machine
    from excite.jobs.executors import find_engine
    from excite.jobs.scheduler import complete

    kind, _, address = options.on.partition(":")
    if kind == "ray":
        import ray

        quiet = {"log_to_driver": False, "logging_level": "error"}
        ray.init(address=address, **quiet) if address else ray.init(
            num_cpus=options.workers, include_dashboard=False, **quiet
        )
    engine = find_engine(options.on, options.workers)
    with tempfile.TemporaryDirectory() as folder:
        todo = [Nap("nap", i, Path(folder) / f"nap-{i}", options.seconds) for i in range(options.tasks)]
        begun = time.time()
        complete(todo, options.workers, engine=engine)
        whole = time.time() - begun
        times = [tuple(map(float, (task.folder / "times").read_text().split())) for task in todo]
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
