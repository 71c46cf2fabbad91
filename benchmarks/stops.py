"""Stopped at random moments and continued: do a training, a sweep and a study end with the same bits as undisturbed ones?

    python -m benchmarks.stops [--stops 300] [--seed 0] [--jobs train sweep study] [--per-job 10] [--cold 20] [--keep FOLDER]

The commands `excite train`, `excite sweep` and `excite study run` are started on small built-in data and stopped by SIGKILL,
SIGTERM and SIGINT, after random delays: each signal goes to the first process, or to its whole process group, as a terminal
does it on Ctrl-C. The same command then continues. Every job is stopped `--per-job` times, then left to end, and compared
with an undisturbed one: weights and optimizer of the last checkpoint, every metric (step, name, value), and every result
(artifacts, sweep.json, numbers.json) except for times. After SIGTERM and SIGINT the exit status must be 130, every run must be
"stopped" or "done", and its last checkpoint must be that of its last step.

Processes are forked from one that has imported everything, so that a start does not cost seconds; one start in `--cold` is a new
Python instead, and may be stopped while it imports. Delays are drawn from `--seed`; where they hit depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import multiprocessing.util
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import spawnv_passfds
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import machine
from excite.cli import app as cli
from excite.runs import load_run
from excite.studies import STUDIES

TRAIN = {
    "data": {"name": "moons", "train": 80, "test": 20},
    "model": {"name": "mlp", "options": {"widths": [12, 12]}},
    "optimizer": {"name": "adam", "lr": 0.01},
    "adversarial": {"radius": 0.1, "steps": 2, "random_start": True, "stages": 2},
    "epochs": 15,
    "batch": 10,
    "checkpoint_every": "13 steps",
    "watch": 5,
}
SWEEP = {
    **TRAIN,
    "epochs": 6,
    "sweep": {"over": {"optimizer.lr": [0.01, 0.02], "batch": [10, 15]}, "metric": "margin", "points": 5},
}
STUDY = "digits-auto"
COMMANDS = {
    "train": ["train", "train.json", "--run", "train"],
    "sweep": ["sweep", "sweep.json", "--out", "sweep", "--workers", "2"],
    # By one worker: trained in the first process.
    "study": ["study", "run", STUDY, "--seeds", "1", "--out", "study", "--workers", "1"],
}
PRELOADED = (
    "excite.jobs.scheduler",
    "excite.jobs.sweep",
    "excite.report",
    "excite.train.evaluate",
    "excite.studies.figures",
    "sympy",
)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
GRACEFUL = (signal.SIGTERM, signal.SIGINT)
PATIENCE = 120.0  # seconds after which a process that was stopped counts as hanging
_inherited = -1  # in a forked process: the pipe that says when all have ended
TIMES = {"time", "seconds", "updated", "changed", "created", "started", "environment", "versions"}


def shrink_study() -> None:
    """The study at a scale of a few seconds, with frequent checkpoints."""
    study = STUDIES[STUDY]
    tiny = dataclasses.replace(study.scales["quick"], epochs=3, points=4)

    def variants(scale: Any) -> list[Any]:
        changes = {
            "data": {"name": "digits", "classes": [8, 9], "train": 40, "test": 10},
            "checkpoint_every": "2 steps",
        }
        return [
            dataclasses.replace(variant, config={**variant.config, **changes}) for variant in study.variants(scale)[:2]
        ]

    STUDIES[STUDY] = dataclasses.replace(study, scales={"quick": tiny}, variants=variants)


def preload() -> None:
    torch.set_num_threads(1)
    shrink_study()
    for name in PRELOADED:
        importlib.import_module(name)


class Command:
    """One start of a command in its own process group. A pipe that every process of it inherits says when all have ended."""

    def __init__(self, words: Sequence[str], folder: Path, cold: bool) -> None:
        self.log = folder / "log"
        self._open, inherited = os.pipe()
        with open(self.log, "wb") as log:
            if cold:
                os.set_inheritable(inherited, True)
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "excite", *words], cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True, close_fds=False, restore_signals=True, preexec_fn=restore_interrupt,
                )  # fmt: skip
                self.pid = self.process.pid
            else:
                sys.stdout.flush()
                self.pid = os.fork()
                if not self.pid:
                    run_command(words, folder, log.fileno(), inherited)
        os.close(inherited)
        while os.getpgid(self.pid) != self.pid:  # the child makes its group itself
            time.sleep(0.001)

    def wait(self, seconds: float) -> int | None:
        """The exit status of the first process, once all have ended; None if they have not by then."""
        end = time.monotonic() + seconds
        if not select.select([self._open], [], [], max(0.0, end - time.monotonic()))[0]:
            return None
        _, status = os.waitpid(self.pid, 0)
        os.close(self._open)
        return os.waitstatus_to_exitcode(status)

    def send(self, number: signal.Signals, group: bool) -> bool:
        """Whether the first process was still running."""
        done = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is not None:
            return False
        (os.killpg if group else os.kill)(self.pid, number)
        return True


def restore_interrupt() -> None:
    """A shell starts what runs in the background with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_command(words: Sequence[str], folder: Path, log: int, pipe: int) -> None:
    """In a forked process: `excite` with these words; never returns."""
    status = 1
    try:
        global _inherited
        _inherited = pipe
        os.setsid()
        restore_interrupt()
        os.chdir(folder)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        multiprocessing.util.spawnv_passfds = fork_server
        sys.argv = ["excite", *words]
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except KeyboardInterrupt:  # before or after the command: what Python makes of it
            status = -signal.SIGINT
        multiprocessing.util._exit_function()  # ends workers, as at the end of every Python
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if status == -signal.SIGINT else status)


def fork_server(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`: the server of workers is forked, so that it need not import anything."""
    if "forkserver" not in words[-1]:
        return int(spawnv_passfds(path, words, passed))
    pid = os.fork()
    if pid:
        return pid
    try:  # as after exec
        wanted = {0, 1, 2, _inherited, *passed}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in wanted:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        exec(words[-1], {})
    finally:
        os._exit(0)


# What is compared.


def results(folder: Path) -> dict[str, Any]:
    """Everything that a job leaves, by name, without times."""
    collected: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.json")):
        name = str(path.relative_to(folder))
        if path.name not in ("tasks.json", "environment.json", "run.json", "time.json") and "/." not in f"/{name}":
            collected[name] = json.dumps(without_times(json.loads(path.read_text())), sort_keys=True)
    for path in runs_in(folder):
        name = str(path.relative_to(folder))
        with load_run(path) as run:
            step, state = run.load_checkpoint()
            collected[f"{name}: status"] = run.status
            collected[f"{name}: last step"] = step
            collected[f"{name}: metrics"] = rows_of(run)
            for part in ("model", "optimizer", "excitation", "watch", "shuffle", "random", "last"):
                collected[f"{name}: {part}"] = bits(state[part])
    return collected


def rows_of(run: Any) -> list[tuple[int, str, str]]:
    frame = run.frame()
    return [(step, name, float(value).hex()) for step, name, value in frame.itertuples(index=False)]


def runs_in(folder: Path) -> list[Path]:
    found = [path.parent for path in folder.rglob("run.json")]
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def bits(value: Any) -> Any:
    """Nested state with the bytes of its tensors; times are left out."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                if value.dim() else value.item().__repr__())  # fmt: skip
    if isinstance(value, dict):
        return {str(key): bits(item) for key, item in value.items() if key not in TIMES}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def markers(folder: Path) -> dict[str, str]:
    return {str(path): (path / "run.json").read_text() for path in runs_in(folder)}


def check_stopped(folder: Path, status: int, before: dict[str, str]) -> Iterator[str]:
    """What is wrong after SIGTERM or SIGINT; `before` are the markers of its runs before the start."""
    if before == markers(folder) and (status == 130 or status < 0):
        return  # before anything was done; an import of torch that is interrupted may end in SIGABRT
    if status != 130 and not (status == 0 and finished(folder)):
        yield f"exit status {status}"
    for path in runs_in(folder):
        marker = json.loads((path / "run.json").read_text())["status"]
        if marker not in ("stopped", "done"):
            yield f"status {marker}"
        with load_run(path) as run:
            steps = [c.step for c in run.checkpoints()]
            losses = [step for step, name, _ in rows_of(run) if name == "loss/step"]
            if (losses[-1] if losses else None) != (steps[-1] if steps else None):
                yield f"last step {losses[-1] if losses else None}, last checkpoint {steps[-1] if steps else None}"


class Options(argparse.Namespace):
    stops: int
    seed: int
    jobs: list[str]
    per_job: int
    cold: int
    keep: Path | None


@dataclass
class Row:
    """One job and signal."""

    stops: int = 0
    resumed: int = 0  # stops after which the command continued to its end
    identical: int = 0
    problems: Counter[str] = field(default_factory=Counter)


def stop_job(
    job: str,
    folder: Path,
    undisturbed: dict[str, Any],
    seconds: float,
    count: int,
    draw: random.Random,
    options: Options,
) -> dict[tuple[signal.Signals, bool], Row]:
    """Stop one job up to `count` times, let it end, compare. One that ends before its signal is left as it is."""
    rows: dict[tuple[signal.Signals, bool], Row] = defaultdict(Row)
    sent: list[tuple[signal.Signals, bool]] = []
    for left in reversed(range(count + 1)):
        before = markers(folder / job)
        new = bool(options.cold) and job != "study" and draw.randrange(options.cold) == 0
        command = Command(COMMANDS[job], folder, new)
        if not left:
            status = command.wait(PATIENCE)
            break
        kind = (draw.choice(SIGNALS), job != "train" and draw.random() < 0.5)
        delay = draw.uniform(0.0, 2.0 * seconds / count + (3.0 if new else 0.1))
        status = command.wait(delay)
        if status is not None:
            break
        if not command.send(*kind):
            status = command.wait(PATIENCE)
            break
        sent.append(kind)
        rows[kind].stops += 1
        status = command.wait(PATIENCE)
        if status is None:
            rows[kind].problems["hangs"] += 1
            command.send(signal.SIGKILL, True)
            command.wait(PATIENCE)
        elif kind[0] in GRACEFUL:
            for problem in check_stopped(folder / job, status, before):
                rows[kind].problems[problem] += 1
                keep(folder, f"{problem}: {kind} after {delay:.3f} s, new Python: {new}", options.keep)
    problems = [] if status == 0 else [f"at the end: exit status {status}: {last_line(command.log)}"]
    if not problems:
        problems = differences(undisturbed, results(folder / job))
    for kind in sent:
        rows[kind].resumed += status == 0
        rows[kind].identical += not problems
        rows[kind].problems.update(problems)
    if problems:
        keep(folder, problems[0], options.keep)
    return rows


def finished(folder: Path) -> bool:
    return all(json.loads((path / "run.json").read_text())["status"] == "done" for path in runs_in(folder))


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def keep(folder: Path, problem: str, target: Path | None) -> None:
    """A copy of what went wrong."""
    if target is not None:
        copied = target / f"{folder.name}-{time.time_ns()}"
        shutil.copytree(folder, copied)
        (copied / "problem").write_text(f"{problem}\n")


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "train.json").write_text(json.dumps(TRAIN))
    (path / "sweep.json").write_text(json.dumps(SWEEP))
    return path


def measure(root: Path, options: Options) -> dict[tuple[str, signal.Signals, bool], Row]:
    """Rows by job, signal, and whether it went to the whole group."""
    preload()
    rows: dict[tuple[str, signal.Signals, bool], Row] = defaultdict(Row)
    draw = random.Random(options.seed)
    for at, job in enumerate(options.jobs):
        wanted = options.stops * (at + 1) // len(options.jobs) - options.stops * at // len(options.jobs)
        begun = time.monotonic()
        folder = make_folder(root / f"{job}-undisturbed")
        command = Command(COMMANDS[job], folder, False)
        if command.wait(PATIENCE) != 0:
            raise RuntimeError(f"excite {' '.join(COMMANDS[job])}: {last_line(command.log)}")
        seconds = time.monotonic() - begun
        undisturbed = results(folder / job)
        count = 0
        while wanted > 0:
            count += 1
            folder = make_folder(root / f"{job}-{count}")
            for kind, row in stop_job(
                job, folder, undisturbed, seconds, min(options.per_job, wanted), draw, options
            ).items():
                total = rows[(job, *kind)]
                wanted -= row.stops
                for name in ("stops", "resumed", "identical", "problems"):
                    setattr(total, name, getattr(total, name) + getattr(row, name))
    return rows


def table(rows: dict[tuple[str, signal.Signals, bool], Row]) -> Iterator[str]:
    yield "| command | signal | stops | resumed | bit-identical | differences |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for (job, number, group), row in sorted(rows.items()):
        problems = "; ".join(f"{name} ({count})" for name, count in row.problems.most_common()) or "none"
        to = f"{number.name} to the group" if group else number.name
        yield f"| `{' '.join(['excite', *COMMANDS[job][: 1 + (job == 'study')]])}` | {to} | {row.stops} | {row.resumed} | {row.identical} | {problems} |"
    stops, identical = sum(row.stops for row in rows.values()), sum(row.identical for row in rows.values())
    yield f"| all | | {stops} | {sum(row.resumed for row in rows.values())} | {identical} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", choices=tuple(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--per-job", type=int, default=10, help="stops of one job before it is left to end")
    parser.add_argument("--cold", type=int, default=20, help="one start in so many is a new Python; 0: none")
    parser.add_argument("--keep", type=Path, help="folder for copies of what went wrong")
    options = parser.parse_args(namespace=Options())
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options)
    print(f"{machine()}; {time.monotonic() - begun:.0f} s\n")
    print("\n".join(table(rows)))
    if any(row.problems for row in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
