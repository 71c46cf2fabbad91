"""Work on a Ray cluster: Ray places it, notices lost machines and tries again; folders say what is done.

Everything that can be known to be wrong is said before anything is scheduled: no cluster at the address, another Python or
Excite on a node, a folder that a node does not see, more GPUs than there are.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from excite._version import __version__
from excite.engines.workers import Reporter, check_pickles, logged, portable
from excite.errors import InputError
from excite.runs.files import writing
from excite.runs.folder import one_line
from excite.work import Failure, Lost, Tell, Work, in_words, log_of, one_thread, worth_another_try

_WAIT = 60.0  # seconds in which every node has to answer


@dataclass(frozen=True)
class OnRay:
    """`address` of a cluster, or None for one of `workers` processors started here; `gpus` for each piece of work."""

    address: str | None = None
    workers: int = 2
    gpus: float = 0.0
    retries: int = 1

    def perform(self, todo: Sequence[Work], tell: Tell) -> list[Failure]:
        if not todo:
            return []
        for task in todo:
            check_pickles(task)
        ray = _import()
        with _connected(ray, self.address, self.workers):
            self._check(ray, todo[0].folder.parent)
            return self._run(ray, todo, tell)

    def _check(self, ray: Any, folder: Path) -> None:
        there = ray.cluster_resources()
        if self.gpus > there.get("GPU", 0):
            raise InputError(
                f"gpus-per-task {self.gpus:g}: the cluster has {there.get('GPU', 0):g} GPUs; ask for fewer"
            )
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            mark = folder / f".seen-{uuid.uuid4().hex}"
            mark.touch()
        try:
            look = ray.remote(num_cpus=0, max_retries=0)(_look)
            asked = {
                node["NodeManagerHostname"]: look.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ).remote(str(mark.resolve()))
                for node in ray.nodes()
                if node["Alive"]
            }
            for node, answer in asked.items():
                try:
                    python, version, seen = ray.get(answer, timeout=_WAIT)
                except ray.exceptions.RayError as error:
                    raise InputError(f"node {node} cannot run Excite: {one_line(error)[-160:]}") from error
                if (python, version) != (platform.python_version(), __version__):
                    raise InputError(
                        f"node {node} has Python {python} and Excite {version}; here are {platform.python_version()} and "
                        f"{__version__}: install the same on both"
                    )
                if not seen:
                    raise InputError(
                        f"node {node} does not see the folder {folder}: choose one on a shared file system"
                    )
        finally:
            mark.unlink(missing_ok=True)

    def _run(self, ray: Any, todo: Sequence[Work], tell: Tell) -> list[Failure]:
        board = ray.remote(num_cpus=0)(Board).remote()
        # Ray itself starts work again whose process or machine is lost, as often as we say.
        work = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=self.retries)(_work)
        running = {work.remote(task, board): (task, self.retries) for task in todo}
        failures: list[Failure] = []
        try:
            while running:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
                for message in ray.get(board.take.remote()):
                    tell(*message)
                for ref in ready:
                    task, tries = running.pop(ref)
                    try:
                        error = ray.get(ref)
                    except ray.exceptions.RayError as lost:
                        failures.append(
                            Failure(task, Lost(f"lost {self.retries + 1} times: {one_line(lost)[:160]}"), log_of(task))
                        )
                        continue
                    if error is None:
                        continue
                    if tries > 0 and worth_another_try(error):
                        running[work.remote(task, board)] = (task, tries - 1)
                    else:
                        failures.append(Failure(task, error, log_of(task)))
        except BaseException:
            for ref in running:
                with contextlib.suppress(Exception):
                    ray.cancel(ref, force=True)  # folders hold what can be continued
            raise
        return failures


class Board:
    """Where work on other machines writes how far it is."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, float]] = []

    def put(self, name: str, phase: str, share: float) -> None:
        self.messages.append((name, phase, share))

    def take(self) -> list[tuple[str, str, float]]:
        taken, self.messages = self.messages, []
        return taken


def _work(task: Work, board: Any) -> Exception | None:
    """On a node: the error instead of an exception, so that Ray does not wrap it."""
    if task.finished():  # by the try before, whose answer was lost
        return None
    try:
        with one_thread(), logged(log_of(task)):
            task.perform(Reporter(board.put.remote))
    except Exception as error:
        return portable(in_words(error))
    return None


def _look(mark: str) -> tuple[str, str, bool]:
    from excite._version import __version__ as version

    for _ in range(20):  # shared file systems may take a moment
        if Path(mark).exists():
            return platform.python_version(), version, True
        time.sleep(0.1)
    return platform.python_version(), version, False


def _import() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed: pip install 'excite[ray]'") from error
    return ray


def _check_reached(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise InputError(f"no Ray cluster at {address}: {error.strerror or error}") from error


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, workers: int) -> Iterator[None]:
    """Connected to the cluster; one that was started here ends with it. A connection of the caller's is used as it is."""
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _check_reached(address)
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    try:
        if address is None:
            ray.init(num_cpus=workers, **quiet)
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"no Ray cluster at {address}" if address else "Ray does not start here"
        raise InputError(f"{where}: {one_line(error)[:160]}") from error
    try:
        yield
    finally:
        ray.shutdown()
