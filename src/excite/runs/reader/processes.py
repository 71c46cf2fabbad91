"""Databases that others can write are read in processes of their own, which may crash."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from excite.errors import RunError
from excite.runs.reader import script as reader_script

ROW = np.dtype([("step", np.int64), ("value", np.float64), ("missing", np.bool_)])
_GRACE = 5.0  # seconds after the time limit of a query in which its process has to answer
_DAY = 86_400.0
MAX_TEXT = 65_536  # bytes of a name
_keys = itertools.count()
AVAILABLE = (
    hasattr(socket, "AF_UNIX") and sys.platform != "win32"
)  # where a mapped file that is shortened ends a process


class Crashed(RunError):
    """The process that read a database has ended, or does not answer."""


class Reader:
    """One process, started when it is needed and again after a crash.

    `lock`: whoever holds it is alone with the process; if that ends meanwhile, it is because of what the holder reads.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._pipe is not None

    def start(self) -> None:
        """Starts the process unless it is running."""
        with self.lock:
            if self._pipe is None:
                self._start()

    def request(self, key: int, seconds: float, action: str, arguments: Any) -> list[Any]:
        """All parts of the answer."""
        with self.lock:
            pipe = self._pipe or self._start()
            chunks = []
            try:
                pipe.send((key, seconds, action, arguments))
                while True:
                    if not pipe.poll(min(max(seconds, 0.0), _DAY) + _GRACE):
                        raise Crashed("the process that reads it does not answer")
                    answer_type, content = pipe.recv()
                    if answer_type == "error":
                        break
                    chunks.append(content)
                    if answer_type == "end":
                        return chunks
            except (EOFError, OSError) as error:
                status = self._end()
                raise Crashed(
                    "the process that read it was ended "
                    + (f"by signal {-status}" if status < 0 else f"with status {status}")
                    + ": was a file changed in place?"
                ) from error
            except BaseException:  # also when interrupted: the rest of the answer would be taken for the next one
                self._end()
                raise
            raise content

    def _start(self) -> Connection[Any, Any]:
        own_socket, child_socket = socket.socketpair()
        with child_socket:
            script = Path(reader_script.__file__)
            command = [sys.executable, "-I", "-S", str(script), str(child_socket.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[child_socket.fileno()], stdin=subprocess.DEVNULL)
        self._pipe = Connection(own_socket.detach())
        self.starts += 1
        return self._pipe

    def _end(self) -> int:
        pipe, process = self._pipe, self._process
        self._pipe = self._process = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        process.kill()
        return process.wait()


class Readers:
    """A few `Reader`s, each of which reads several databases."""

    def __init__(self, count: int = 4) -> None:
        self._readers = [Reader() for _ in range(count)]
        self._next = itertools.cycle(self._readers)

    def start(self) -> None:
        """Starts the first process now, so that the first database does not wait for it."""
        if AVAILABLE:
            self._readers[0].start()

    def assign(self) -> Reader:
        """The next one in turn."""
        return next(self._next)


class ReadElsewhere:
    """A database that is open in the process of `reader`; the part of `sqlite3.Connection` that reading needs."""

    def __init__(self, reader: Reader, address: str, timeout: float, seconds: float) -> None:
        self._reader, self._key, self.seconds = reader, next(_keys), seconds
        with reader.lock:
            reader.request(self._key, seconds, "open", (address, timeout, MAX_TEXT))
            self._start = reader.starts

    @property
    def ended(self) -> bool:
        """Whether the process it was open in has ended."""
        return self._start != self._reader.starts or not self._reader.running

    def execute(self, query: str, values: tuple[Any, ...] = ()) -> Rows:
        """Runs a query in the other process."""
        return Rows(self._request("read", [(query, values, False)])[-1][0])

    def execute_together(self, *queries: tuple[str, tuple[Any, ...]], array: int) -> list[Any]:
        """Rows of several queries as of one moment, requested at once; those of number `array` are (step, value, missing)."""
        *chunks, last = self._request("read", [(*query, at == array) for at, query in enumerate(queries)])
        return [_joined([*chunks, rows]) if at == array else rows for at, rows in enumerate(last)]

    def close(self) -> None:
        """Closes the database in the other process."""
        with self._reader.lock:
            if not self.ended:
                with suppress(Crashed):
                    self._request("close", None)

    def _request(self, action: str, arguments: Any) -> list[Any]:
        if self.ended:
            raise Crashed("the process that read it has ended")
        return self._reader.request(self._key, self.seconds, action, arguments)


def _joined(chunks: list[tuple[bytes, bytes, bytes]]) -> npt.NDArray[Any]:
    rows = np.empty(sum(len(chunk[2]) for chunk in chunks), ROW)
    for name, dtype, contents in zip(ROW.names or (), (np.int64, np.float64, np.bool_), zip(*chunks)):
        rows[name] = np.frombuffer(b"".join(contents), dtype)
    return rows


class Rows(list[Any]):
    """All rows of an answer, read like a cursor."""

    def fetchone(self) -> Any:
        """Returns the first row, or None."""
        return self[0] if self else None

    def fetchall(self) -> list[Any]:
        """Returns all rows."""
        return self
