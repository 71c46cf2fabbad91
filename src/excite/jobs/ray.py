"""Work on a Ray cluster: Ray places it, notices lost machines and tries again; folders say what is done.

Everything that can be known to be wrong is said before anything is scheduled: no cluster at the address, another Python or
Excite on a node, a folder that a node does not see, more GPUs than there are.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from excite.errors import InputError, one_line
from excite.jobs.job import Failure, Lost, Tell, Work, failed, in_words, one_thread, worth_another_try
from excite.jobs.local import Reporter, check_travels, portable
from excite.jobs.logs import log_of, recorded
from excite.jobs.messages import Messages
from excite.jobs.node_report import look
from excite.jobs.nodes import check_gpus, check_reports, mark_for

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
            check_travels(task)
        ray = _import()
        with _connected(ray, self.address, self.workers):
            self._check(ray, todo[0])
            return self._run(ray, todo, tell)

    def _check(self, ray: Any, task: Work) -> None:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        check_gpus(self.gpus, {name: node["Resources"].get("GPU", 0.0) for name, node in nodes.items()})
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        mark = mark_for(task)
        mark.leave()
        try:
            ask = ray.remote(num_cpus=0, max_retries=0)(look)
            asked = {
                f"{node['NodeManagerHostname']} ({name[:8]})": ask.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)
                ).remote(mark)
                for name, node in nodes.items()
            }
            reports = {}
            for name, answer in asked.items():
                try:
                    reports[name] = ray.get(answer, timeout=_WAIT)
                except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
                    continue  # a node that was lost a moment ago
                except ray.exceptions.RayError as error:
                    raise InputError(f"node {name} cannot run Excite: {one_line(error)[-160:]}") from error
            check_reports(reports, mark.place)
        finally:
            mark.remove()

    def _board(self, ray: Any) -> Any:
        """On this node: one that is lost takes work with it, not the view of it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return ray.remote(num_cpus=0, max_restarts=-1)(Messages).options(scheduling_strategy=here).remote()

    def _run(self, ray: Any, todo: Sequence[Work], tell: Tell) -> list[Failure]:
        board = self._board(ray)
        # Ray itself starts work again whose process or machine is lost, as often as we say.
        work = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=self.retries)(_work)
        running = {work.remote(task, board): (task, self.retries) for task in todo}
        failures: list[Failure] = []
        try:
            while running:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
                with contextlib.suppress(ray.exceptions.RayError):  # not seen for a while, but done
                    for message in ray.get(board.take.remote(), timeout=_WAIT):
                        tell(*message)
                for ref in ready:
                    task, tries = running.pop(ref)
                    try:
                        error = ray.get(ref)
                    except ray.exceptions.RayError as lost:
                        error, tries = Lost(f"lost {self.retries + 1} times: {one_line(lost)[:160]}"), 0
                    if error is None:
                        tell(task.folder.name, "done", 1.0)
                    elif tries > 0 and worth_another_try(error):
                        running[work.remote(task, board)] = (task, tries - 1)
                        tell(task.folder.name, "waiting", 0.0)
                    else:
                        failures.append(Failure(task, error, log_of(task)))
                        tell(task.folder.name, failed(error), 0.0)
        except BaseException:
            for ref in running:
                with contextlib.suppress(Exception):
                    ray.cancel(ref, force=True)  # folders hold what can be continued
            raise
        return failures


def _work(task: Work, board: Any) -> Exception | None:
    """On a node: the error instead of an exception, so that Ray does not wrap it."""
    if task.finished():  # by the try before, whose answer was lost
        return None
    try:
        board.put.remote(task.folder.name, "starting", 0.0)
        with one_thread(), recorded(task):
            task.perform(Reporter(board.put.remote))
    except Exception as error:
        return portable(in_words(error))
    return None


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
        if "version mismatch" in str(error).lower():  # Ray compares its own version and that of Python itself
            where = f"the cluster at {address} has other versions"
        raise InputError(f"{where}: {one_line(error)[:160]}") from error
    try:
        yield
    finally:
        ray.shutdown()
