"""Who does the work: worker processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from excite.errors import InputError
from excite.jobs.job import Failure, Tell, Work
from excite.jobs.local import Workers

__all__ = ["Engine", "Workers", "find_engine"]


class Engine(Protocol):
    def perform(self, todo: Sequence[Work], tell: Tell) -> list[Failure]:
        """All of `todo`; what could not be finished."""


def find_engine(on: str | None, workers: int = 2, gpus: float = 0.0, retries: int = 1) -> Engine | None:
    """`on`: None for this process, "local" for worker processes, "ray" for a cluster started here, "ray:ADDRESS"."""
    if on is None:
        if gpus:
            raise InputError("gpus-per-task needs worker processes: --on local, --on ray or --on ray:ADDRESS")
        return None
    kind, _, address = str(on).partition(":")
    if kind == "local" and not address:
        return Workers(workers, retries, gpus)
    if kind == "ray":
        from excite.jobs.ray import OnRay

        return OnRay(address or None, workers, gpus, retries)
    raise InputError(f"on: expected 'local', 'ray' or 'ray:ADDRESS'; got {on!r}")
