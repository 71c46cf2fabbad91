"""Worker processes with one thread each. A killed process is replaced, and its job started again.

Why not concurrent.futures or loky: there a process that is killed breaks the pool and fails every job that is
running, and neither says which job it had. Here the others continue, the job is known, and its retries are counted.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from excite.errors import InputError, RunError, one_line
from excite.jobs.job import Job, JobFailure, WorkerLost, is_transient, readable_error
from excite.jobs.logs import log_path, log_to_file
from excite.jobs.preload import worker_context
from excite.jobs.progress import JobProgress, ProgressCallback
from excite.jobs.workspace import check_store_is_shared
from excite.train.stopping import stop_signals

_STOP_TIMEOUT = 60.0  # seconds that a worker has to end its step and write a checkpoint after Ctrl-C
_MIN_STEP = 0.01  # of progress between two messages of a worker


@dataclass(frozen=True)
class ProcessExecutor:
    """Runs jobs on worker processes of this machine.

    Args:
        workers: Number of processes.
        retries: How often a job is started again whose process was lost, or that failed unexpectedly.
        gpus: GPUs of each process; below 1, several processes share one. At most as many processes start as the GPUs
            allow. With 0, every process sees all GPUs.

    Example:
        >>> ProcessExecutor(workers=2).run([], print)
        []
    """

    workers: int = 2
    retries: int = 1
    gpus: float = 0.0

    def run(self, jobs: Sequence[Job], on_progress: ProgressCallback) -> list[JobFailure]:
        """Runs all jobs.

        Args:
            jobs: The jobs.
            on_progress: Called with a `JobProgress` whenever a job changes.

        Returns:
            Those that could not be finished.
        """
        for job in jobs:
            check_can_be_sent(job)
        devices = assign_gpus(self.workers, self.gpus, _visible_gpus() if self.gpus else [])
        pool = _Pool([_Worker(worker_context(), gpus) for gpus in devices[: len(jobs)]])
        queue = deque((job, self.retries) for job in jobs)
        failures: list[JobFailure] = []
        with pool:
            while queue or pool.busy():
                for worker in pool.idle() if queue else []:
                    if queue:
                        worker.start(*queue.popleft())
                        on_progress(JobProgress(worker.latest.folder.name, "starting"))
                for worker in pool.wait():
                    error = worker.receive(on_progress)
                    if error is None:
                        continue
                    job, retries = worker.latest, worker.retries
                    if retries > 0 and is_transient(error):
                        queue.append((job, retries - 1))
                        on_progress(JobProgress(job.folder.name, status="waiting"))
                    else:
                        failures.append(JobFailure(job, error, log_path(job)))
                        on_progress(failures[-1].progress)
        return failures


def assign_gpus(workers: int, gpus: float, devices: Sequence[str]) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each process, at most `workers` of them; None where a process sees all GPUs."""
    if not gpus:
        return [None] * workers
    if gpus > (count := len(devices)):
        raise InputError(
            f"gpus-per-job {gpus:g}: this machine has {count} GPU{'s' * (count != 1)}; "
            + ("request fewer" if count else "leave it out to train on the CPU")
        )
    if gpus < 1:
        assigned = list(devices) * int(1 / gpus + 1e-9)
    else:
        each = math.ceil(gpus)
        assigned = [",".join(devices[at : at + each]) for at in range(0, count - each + 1, each)]
    return list(assigned[:workers])


def _visible_gpus() -> list[str]:
    """The GPUs that this process sees, under the names in its CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] if names else [str(device) for device in range(count)]


def check_can_be_sent(job: Job) -> None:
    """Refuses a job that does not pickle, or whose store another process would not see."""
    check_store_is_shared(job)
    try:
        pickle.dumps(job)
    except Exception as error:
        raise InputError(
            f"{job.folder.name} cannot be sent to another process ({one_line(error)[:120]}): define what it uses in a module"
        ) from error


class _Worker:
    """A process, and the job that it runs."""

    def __init__(self, context: Any, gpus: str | None):
        self.context, self.gpus = context, gpus
        self.pipe, end = context.Pipe()
        environment = dict(os.environ) if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        self.process = context.Process(target=_run_worker, args=(end, environment), daemon=True)
        self.process.start()
        end.close()
        self.busy = False
        self.latest: Job
        self.retries = 0

    def start(self, job: Job, retries: int) -> None:
        self.latest, self.retries, self.busy = job, retries, True
        with contextlib.suppress(OSError):  # `receive` notices a process that has just died
            self.pipe.send(job)

    def receive(self, on_progress: ProgressCallback) -> Exception | None:
        """Handles one message; returns the error if the job has ended with one."""
        try:
            content = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self.busy = False
            code = self.process.exitcode
            ending = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
            return WorkerLost(f"its process {ending}")
        if isinstance(content, JobProgress):
            on_progress(content)
            return None
        self.busy = False
        return content if isinstance(content, Exception) else None

    def join(self) -> None:
        self.process.join(_STOP_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Pool:
    """The workers of one call. On leaving after an error they stop after their current step, with a checkpoint."""

    def __init__(self, workers: list[_Worker]) -> None:
        self.workers = workers

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        for worker in self.workers:
            worker.pipe.close()
            if error_type is not None:
                worker.process.terminate()
        for worker in self.workers:
            worker.join()

    def busy(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.busy]

    def idle(self) -> list[_Worker]:
        """Workers without a job; dead ones are replaced first."""
        for at, worker in enumerate(self.workers):
            if not worker.busy and not worker.process.is_alive():
                self.workers[at] = _Worker(worker.context, worker.gpus)
        return [worker for worker in self.workers if not worker.busy]

    def wait(self) -> list[_Worker]:
        """Workers that have sent a message, or have died; waits for half a second at most."""
        by_pipe = {worker.pipe: worker for worker in self.busy()}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe), timeout=0.5) if isinstance(pipe, Connection)]


def _run_worker(pipe: Any, environment: Mapping[str, str]) -> None:
    os.environ.clear()  # that of the server may be older
    os.environ.update(environment)
    # Ctrl-C reaches every process of the terminal; only the first one is to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt), stop_signals(signal.SIGTERM, insist=False):
        _run_received_jobs(pipe)


def _run_received_jobs(pipe: Any) -> None:
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        error = None
        try:
            with log_to_file(job):
                job.run(ThrottledProgress(pipe.send))
        except Exception as raised:
            error = portable_error(readable_error(raised))
        with contextlib.suppress(OSError):
            pipe.send(error)


class ThrottledProgress:
    """Sends a message for every hundredth of a job; if nobody receives them any more the job ends, as after Ctrl-C."""

    def __init__(self, send: Callable[[JobProgress], Any]):
        self.send, self.last = send, -1.0

    def __call__(self, progress: JobProgress) -> None:
        """Sends the progress if it has changed enough; a closed pipe ends the job."""
        if progress.fraction - self.last >= _MIN_STEP or progress.fraction >= 1:
            self.last = progress.fraction
            try:
                self.send(progress)
            except OSError:
                raise KeyboardInterrupt from None


def portable_error(error: Exception) -> Exception:
    """The error, or a RunError with its text if it does not pickle."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if str(copy) == str(error) else RunError(f"{type(error).__name__}: {error}")
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")
