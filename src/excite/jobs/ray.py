"""Jobs on a Ray cluster: Ray places them, notices lost machines and starts jobs again; folders hold what is done.

Checked before anything is scheduled: whether there is a cluster at the address, Python and Excite of every node, whether
the nodes see the workspace, and the number of GPUs.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from excite.errors import InputError, one_line
from excite.jobs.job import Job, JobFailure, WorkerLost, is_transient, readable_error, single_thread
from excite.jobs.local import ThrottledProgress, check_can_be_sent, portable_error
from excite.jobs.logs import log_path, log_to_file
from excite.jobs.node_report import report_node
from excite.jobs.nodes import check_gpus, check_reports, marker_for
from excite.jobs.progress import JobProgress, LatestProgress, ProgressCallback, done
from excite.train.stopping import stop_signals

_NODE_TIMEOUT = 60.0  # seconds in which every node has to answer
_GRACE = 30.0  # seconds in which jobs that are stopped finish their step and write a checkpoint


@dataclass(frozen=True)
class RayExecutor:
    """Runs jobs on a Ray cluster.

    Args:
        address: Address of a running cluster; None starts one on this machine.
        workers: Processors of a cluster that is started on this machine.
        gpus: GPUs for each job.
        retries: How often a job is started again whose process or machine was lost, or that failed unexpectedly.
    """

    address: str | None = None
    workers: int = 2
    gpus: float = 0.0
    retries: int = 1

    def run(self, jobs: Sequence[Job], on_progress: ProgressCallback) -> list[JobFailure]:
        """Runs all jobs and returns those that could not be finished."""
        if not jobs:
            return []
        for job in jobs:
            check_can_be_sent(job)
        ray = _import_ray()
        with _connect(ray, self.address, self.workers):
            self._check_nodes(ray, jobs[0])
            return self._schedule(ray, jobs, on_progress)

    def _check_nodes(self, ray: Any, job: Job) -> None:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        check_gpus(self.gpus, {name: node["Resources"].get("GPU", 0.0) for name, node in nodes.items()})
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        marker = marker_for(job)
        marker.create()
        try:
            remote = ray.remote(num_cpus=0, max_retries=0)(report_node)
            requests = {
                f"{node['NodeManagerHostname']} ({name[:8]})": remote.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False)
                ).remote(marker)
                for name, node in nodes.items()
            }
            reports = {}
            for name, request in requests.items():
                try:
                    reports[name] = ray.get(request, timeout=_NODE_TIMEOUT)
                except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
                    continue  # a node that was lost a moment ago
                except ray.exceptions.RayError as error:
                    raise InputError(f"node {name} cannot run Excite: {one_line(error)[-160:]}") from error
            check_reports(reports, marker.location)
        finally:
            marker.remove()

    def _start_actor(self, ray: Any) -> Any:
        """The actor that collects progress, on this node: losing another node does not lose it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        return ray.remote(num_cpus=0, max_restarts=-1)(LatestProgress).options(scheduling_strategy=this_node).remote()

    def _schedule(self, ray: Any, jobs: Sequence[Job], on_progress: ProgressCallback) -> list[JobFailure]:
        actor = self._start_actor(ray)
        # Ray itself starts a job again, up to `retries` times, whose process or machine is lost.
        remote = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=self.retries)(_run_on_node)
        running = {remote.remote(job, actor): (job, self.retries) for job in jobs}
        failures: list[JobFailure] = []
        try:
            while running:
                ready, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
                with contextlib.suppress(ray.exceptions.RayError):  # without messages the jobs continue
                    for progress in ray.get(actor.drain.remote(), timeout=_NODE_TIMEOUT):
                        on_progress(progress)
                for ref in ready:
                    job, retries = running.pop(ref)
                    try:
                        error = ray.get(ref)
                    except ray.exceptions.RayError as lost:
                        error, retries = WorkerLost(f"lost {self.retries + 1} times: {one_line(lost)[:160]}"), 0
                    if error is None:
                        on_progress(done(job.folder.name))
                    elif retries > 0 and is_transient(error):
                        running[remote.remote(job, actor)] = (job, retries - 1)
                        on_progress(JobProgress(job.folder.name, status="waiting"))
                    else:
                        failures.append(JobFailure(job, error, log_path(job)))
                        on_progress(failures[-1].progress)
        except BaseException:
            _stop(ray, list(running))  # the next start continues from their folders
            raise
        return failures


def _stop(ray: Any, running: Sequence[Any]) -> None:
    """Interrupts jobs, which then write a checkpoint; those that take longer than `_GRACE` are killed."""
    try:
        for ref in running:
            with contextlib.suppress(Exception):
                ray.cancel(ref)  # as Ctrl-C in the job's process
        with contextlib.suppress(Exception):
            ray.wait(list(running), num_returns=len(running), timeout=_GRACE)
    finally:
        for ref in running:
            with contextlib.suppress(Exception):
                ray.cancel(ref, force=True)


def _run_on_node(job: Job, actor: Any) -> Exception | None:
    """Called on a node; returns the error instead of raising it, so that Ray does not wrap it."""
    if job.finished():  # by the try before, whose answer was lost
        return None
    try:
        actor.put.remote(JobProgress(job.folder.name, "starting"))
        with single_thread(), log_to_file(job), stop_signals(signal.SIGINT, insist=False):
            job.run(ThrottledProgress(actor.put.remote))
    except Exception as error:
        return portable_error(readable_error(error))
    return None


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError("Ray is not installed: pip install 'excite[ray]'") from error
    return ray


def _check_address(address: str) -> None:
    """Refuses an address where nothing listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise InputError(f"no Ray cluster at {address}: {error.strerror or error}") from error


@contextlib.contextmanager
def _connect(ray: Any, address: str | None, workers: int) -> Iterator[None]:
    """Connects to a cluster, or starts one and stops it at the end; an existing connection of the caller is used."""
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _check_address(address)
    quiet = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    try:
        if address is None:
            ray.init(num_cpus=workers, **quiet)
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        problem = f"no Ray cluster at {address}" if address else "Ray does not start on this machine"
        if "version mismatch" in str(error).lower():  # Ray compares its own version and that of Python itself
            problem = f"the cluster at {address} has other versions"
        raise InputError(f"{problem}: {one_line(error)[:160]}") from error
    try:
        yield
    finally:
        ray.shutdown()
