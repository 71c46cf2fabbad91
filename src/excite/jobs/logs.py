"""The log of a piece of work: what its process prints, and the traceback of what stopped it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from excite._core.files import writing
from excite.errors import ExciteError, one_line
from excite.jobs.job import Work


def log_of(task: Work) -> str:
    """Where its output is: beside the runs, unless the work knows better."""
    return str(getattr(task, "log", task.folder.parent / "logs" / f"{task.folder.name}.log"))


def recorded(task: Work) -> AbstractContextManager[None]:
    """A context whose output goes to the work's log."""
    own: Callable[[], AbstractContextManager[None]] | None = getattr(task, "recorded", None)
    return logged(Path(log_of(task))) if own is None else own()


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Send what this process prints, also from libraries, to the end of a file; exceptions are written there too."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1)
    try:
        with file, _printing_to(file):
            try:
                yield
            except Exception as error:
                if not isinstance(error, ExciteError):
                    traceback.print_exc(file=file)
                else:
                    print(one_line(error), file=file)
                raise
    finally:
        if path.exists() and path.stat().st_size == 0:
            path.unlink(missing_ok=True)


@contextmanager
def _printing_to(file: IO[str]) -> Iterator[None]:
    _flush()
    kept = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        yield
    finally:
        _flush()
        for stream, copy in zip((1, 2), kept):
            os.dup2(copy, stream)
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
