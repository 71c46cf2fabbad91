"""The process in which databases of others are read: run as a script, by `excite.runs.reader.processes`, with the standard library only.

SQLite maps metrics.db-shm into memory. Whoever shortens that file in place ends the process that reads it (SIGBUS); it is
this one.
"""

import array
import contextlib
import signal
import sqlite3
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

_CHECK_EVERY = 10_000  # instructions of SQLite between two checks of the time
_CHUNK = 100_000  # rows per message


def serve(pipe: "Connection[Any, Any]") -> None:
    """Answers (key, seconds, action, arguments) until the other end is closed: one or more ("part", rows), then ("end", rows) or ("error", error)."""
    databases: dict[int, sqlite3.Connection] = {}
    deadline = [0.0]
    while True:
        try:
            key, seconds, action, arguments = pipe.recv()
        except EOFError:
            return
        deadline[0] = time.monotonic() + seconds
        try:
            if action == "open":
                address, timeout, max_text = arguments
                database = sqlite3.connect(address, uri=True, timeout=timeout, isolation_level=None)
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max_text)
                database.set_progress_handler(lambda: time.monotonic() > deadline[0], _CHECK_EVERY)
                databases[key] = database
                answer: Any = None
            elif action == "close":
                databases.pop(key).close()
                answer = None
            else:  # queries, as of one moment if there are several; one of them at most wants columns
                answer = []
                if len(arguments) > 1:
                    databases[key].execute("BEGIN")
                for query, values, wants_columns in arguments:
                    cursor = databases[key].execute(query, values)
                    if wants_columns:
                        while len(rows := cursor.fetchmany(_CHUNK)) == _CHUNK:
                            pipe.send(("part", columns(rows)))
                        answer.append(columns(rows))
                    else:
                        answer.append(cursor.fetchall())
                if len(arguments) > 1:
                    databases[key].execute("COMMIT")
            pipe.send(("end", answer))
        except (sqlite3.Error, TypeError, ValueError, OverflowError, MemoryError) as error:
            pipe.send(("error", error))  # whoever asked closes the database then


def columns(rows: list[tuple[int, float, int]]) -> tuple[bytes, bytes, bytes]:
    """Steps (int64), values (float64) and whether they are missing (one byte each)."""
    steps, values, missing = zip(*rows) if rows else ((), (), ())
    return array.array("q", steps).tobytes(), array.array("d", values).tobytes(), bytes(missing)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal
    with contextlib.suppress(OSError):  # nobody waits for the answer any more
        serve(Connection(int(sys.argv[1])))
