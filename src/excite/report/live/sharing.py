"""Runs requests in a few threads; identical concurrent requests are computed once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

THREADS, PER_CLIENT = 8, 6  # computations at a time: all together, and of one address
Result = TypeVar("Result")


class Sharing(Generic[Result]):
    """Runs computations in threads, at most `THREADS` in all and `PER_CLIENT` per address.

    Requests with the same key that arrive while one is running share the next one, so no result is older than its request.
    No request is refused: a connection has one at a time, and connections are limited (see `connections`).
    """

    def __init__(self) -> None:
        self._running: dict[object, asyncio.Future[Result]] = {}
        self._next: dict[object, asyncio.Future[Result]] = {}
        self._clients: dict[str, asyncio.Semaphore] = {}
        self._waiting: Counter[str] = Counter()
        self._threads: CapacityLimiter | None = None

    async def get(self, key: object, client: str, compute: Callable[[], Result]) -> Result:
        """The result of `compute`, or of an equal one; it counts towards the limit of the address `client`."""
        if key not in self._next:
            self._next[key] = asyncio.ensure_future(self._compute(key, client, compute))
        return await asyncio.shield(self._next[key])

    async def _compute(self, key: object, client: str, compute: Callable[[], Result]) -> Result:
        if key in self._running:
            await asyncio.wait([self._running[key]])
        self._waiting[client] += 1
        try:
            async with self._clients.setdefault(client, asyncio.Semaphore(PER_CLIENT)):
                self._threads = self._threads or CapacityLimiter(THREADS)
                async with self._threads:
                    self._running[key] = self._next.pop(key)  # who comes from here on wants another one
                    try:
                        return await run_sync(compute, limiter=CapacityLimiter(1))
                    finally:
                        del self._running[key]
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client], self._clients[client]
