"""Connections of the live page: time limits in both directions and a limit on their number.

At the limit an idle connection is closed, of the address with the most connections first. Requests queue in `sharing`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

OPTIONS: dict[str, Any] = {
    "ws": "none", "lifespan": "off", "log_level": "warning", "access_log": False, "server_header": False,
    "timeout_keep_alive": 10, "timeout_graceful_shutdown": 2,
}  # fmt: skip
MAX_CONNECTIONS = 1000
REQUEST_SECONDS, WRITE_SECONDS = 10.0, 30.0  # for a whole request to come in, and for a part of an answer to be taken
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"retry-after: 2\r\n\r\nall connections are in use: try again\n"
)
_numbers = itertools.count()


class Connection(H11Protocol):
    """Uvicorn's HTTP connection with time limits for a whole request and for reading the response."""

    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, or closes it if all are in use."""
        self.number = next(_numbers)
        full = len(self.connections) >= MAX_CONNECTIONS
        super().connection_made(transport)
        # asyncio does this only for sockets that name their protocol; else the end of an answer waits 40 ms for an ACK.
        with suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if full and not self._evict():
            transport.write(_BUSY)
            transport.close()
            return
        self._time_request()

    def _evict(self) -> bool:
        """Close the oldest idle connection of the address that has the most; False if all have a request under way."""
        others = [message for message in self.connections if message is not self and isinstance(message, Connection)]
        counts = Counter(message.address for message in others)
        idle = [message for message in others if message.idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda message: (-counts[message.address], message.number))
        oldest.connections.discard(oldest)
        oldest.transport.abort()
        return True

    @property
    def address(self) -> str:
        """The client's address."""
        return self.client[0] if self.client else ""

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Passes data on and updates the timer of the request."""
        super().data_received(data)
        self._time_request()

    def on_response_complete(self) -> None:
        """Restarts the timer if the request was not complete yet."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # answered before all of the request was there
            self._time_request()

    def _time_request(self) -> None:
        """The timer runs from the first moment at which something of a request is missing until it is complete."""
        if self.idle and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            if self._request_timer is None:
                self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._abort)
        else:
            self._stop_timers("_request_timer")

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection; aborts one whose response is not being read."""
        if self.transport.get_write_buffer_size():  # an answer that nobody takes
            self._abort()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """Starts the timer of a response that is not being read."""
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(WRITE_SECONDS, self._abort)

    def resume_writing(self) -> None:
        """Stops that timer."""
        super().resume_writing()
        self._stop_timers("_write_timer")

    def _abort(self) -> None:
        self.transport.abort()

    def _stop_timers(self, *names: str) -> None:
        for name in names:
            timer: asyncio.TimerHandle | None = getattr(self, name)
            if timer is not None:
                timer.cancel()
            setattr(self, name, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all timers."""
        self._stop_timers("_request_timer", "_write_timer")
        super().connection_lost(exc)
        self._unset_keepalive_if_required()


def configured(app: Any, **more: Any) -> uvicorn.Config:
    """Uvicorn's config with these connections."""
    return uvicorn.Config(app, http=Connection, **OPTIONS | more)


def allow_many_files() -> None:
    """Raise this process's limit on open files, where it is lower than connections and databases need."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 4 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(4 * MAX_CONNECTIONS, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
