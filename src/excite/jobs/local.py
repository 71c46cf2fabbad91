"""Worker processes of one thread each. One that is killed is replaced, and its work tried again."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from excite.errors import InputError, RunError, one_line
from excite.jobs.job import Failure, Lost, Tell, Work, failed, in_words, worth_another_try
from excite.jobs.logs import log_of, recorded
from excite.jobs.preload import workers_context
from excite.jobs.workspace import check_shared
from excite.train.stopping import stop_signals

_PATIENCE = 60.0  # seconds that a worker has to end its step and write a checkpoint after Ctrl-C


@dataclass(frozen=True)
class Workers:
    """`count` processes; a piece of work that is lost or fails for no reason of its own is tried `retries` times more.

    With `gpus` every process sees so many GPUs of its own, or one that it shares with others, and there are no more processes
    than the GPUs allow; without, all see all.
    """

    count: int = 2
    retries: int = 1
    gpus: float = 0.0

    def perform(self, todo: Sequence[Work], tell: Tell) -> list[Failure]:
        for task in todo:
            check_travels(task)
        slots = gpu_slots(self.count, self.gpus, _devices() if self.gpus else [])
        context = workers_context()
        left = deque((task, self.retries) for task in todo)
        crew = [_Worker(context, slot) for slot in slots[: len(left)]]
        failures: list[Failure] = []
        stopped = True
        try:
            while left or any(worker.task is not None for worker in crew):
                for at, worker in enumerate(crew):
                    if worker.task is None and left:
                        if not worker.process.is_alive():
                            crew[at] = worker = _Worker(context, worker.slot)
                        worker.start(*left.popleft())
                        tell(worker.last[0].folder.name, "starting", 0.0)
                for worker in _heard(crew):
                    error = worker.listen(tell)
                    if worker.task is None and error is not None:
                        task, tries = worker.last
                        if tries > 0 and worth_another_try(error):
                            left.append((task, tries - 1))
                            tell(task.folder.name, "waiting", 0.0)
                        else:
                            failures.append(Failure(task, error, log_of(task)))
                            tell(task.folder.name, failed(error), 0.0)
            stopped = False
        finally:
            for worker in crew:
                worker.pipe.close()
                if stopped:
                    worker.process.terminate()  # a training ends after its step, with a checkpoint
            for worker in crew:
                worker.end()
        return failures


def gpu_slots(count: int, gpus: float, devices: Sequence[str]) -> list[str | None]:
    """The GPUs of each process, as CUDA_VISIBLE_DEVICES says it; None for all of them. At most `count` processes."""
    if not gpus:
        return [None] * count
    if gpus > (there := len(devices)):
        raise InputError(
            f"gpus-per-task {gpus:g}: this machine has {there} GPU{'s' * (there != 1)}; "
            + ("ask for fewer" if there else "leave it out to train on the CPU")
        )
    if gpus < 1:
        found = list(devices) * int(1 / gpus + 1e-9)
    else:
        each = math.ceil(gpus)
        found = [",".join(devices[at : at + each]) for at in range(0, there - each + 1, each)]
    return list(found[:count])


def _devices() -> list[str]:
    """The GPUs that this process sees, by the names that it was given for them."""
    there = torch.cuda.device_count()
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return given[:there] if given else [str(device) for device in range(there)]


def check_travels(task: Work) -> None:
    """Refuse what another process could not be sent, or would not see."""
    check_shared(task)
    try:
        pickle.dumps(task)
    except Exception as error:
        raise InputError(
            f"{task.folder.name} cannot be sent to another process ({one_line(error)[:120]}): define what it uses in a module"
        ) from error


class _Worker:
    """A process, and what it is at."""

    def __init__(self, context: Any, slot: str | None):
        self.pipe, end = context.Pipe()
        self.slot = slot
        environment = dict(os.environ) if slot is None else {**os.environ, "CUDA_VISIBLE_DEVICES": slot}
        self.process = context.Process(target=_serve, args=(end, environment), daemon=True)
        self.process.start()
        end.close()
        self.task: Work | None = None
        self.last: tuple[Work, int]

    def start(self, task: Work, tries: int) -> None:
        self.task, self.last = task, (task, tries)
        with contextlib.suppress(OSError):  # a process that died meanwhile is noticed by its silence
            self.pipe.send(task)

    def listen(self, tell: Tell) -> Exception | None:
        """One message; the error, if the work has ended with one."""
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self.task = None
            code = self.process.exitcode
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
            return Lost(f"its process {how}")
        if kind == "progress":
            tell(*content)
            return None
        self.task = None
        return content if isinstance(content, Exception) else None

    def end(self) -> None:
        self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _heard(crew: Sequence[_Worker]) -> list[_Worker]:
    """The workers that have something to say, or have died."""
    busy = {worker.pipe: worker for worker in crew if worker.task is not None}
    return [busy[pipe] for pipe in wait(list(busy), timeout=0.5) if isinstance(pipe, Connection)]


def _serve(pipe: Any, environment: Mapping[str, str]) -> None:
    os.environ.clear()  # that of the server may be older
    os.environ.update(environment)
    # Ctrl-C reaches every process of the terminal; only the first one is to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt), stop_signals(signal.SIGTERM, insist=False):
        _serve_tasks(pipe)


def _serve_tasks(pipe: Any) -> None:
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            with recorded(task):
                task.perform(Reporter(lambda *what: pipe.send(("progress", what))))
            with contextlib.suppress(OSError):
                pipe.send(("done", None))
        except Exception as error:
            with contextlib.suppress(OSError):
                pipe.send(("done", portable(in_words(error))))


class Reporter:
    """Passes progress on, a message a hundredth; when nobody listens any more the work ends, as by Ctrl-C."""

    def __init__(self, send: Any):
        self.send, self.last = send, -1.0

    def __call__(self, name: str, phase: str, share: float) -> None:
        if share - self.last >= 0.01 or share >= 1:
            self.last = share
            try:
                self.send(name, phase, share)
            except OSError:
                raise KeyboardInterrupt from None


def portable(error: Exception) -> Exception:
    """The error, or one that says the same, if it cannot travel between processes."""
    try:
        again = pickle.loads(pickle.dumps(error))
        return error if str(again) == str(error) else RunError(f"{type(error).__name__}: {error}")
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")
