"""The log of a job: the output of its process, and the traceback of the error that stopped it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from excite._core.files import writing
from excite.errors import ExciteError, one_line

if TYPE_CHECKING:
    from excite.jobs.job import Job


def log_path(job: Job) -> str:
    """File or URL of a job's output: logs/NAME.log beside the runs, unless the job has a `log` of its own."""
    return str(getattr(job, "log", job.folder.parent / "logs" / f"{job.folder.name}.log"))


def log_to_file(job: Job) -> AbstractContextManager[None]:
    """A context whose output is appended to the job's log."""
    own: Callable[[], AbstractContextManager[None]] | None = getattr(job, "log_to_store", None)
    return append_output(Path(log_path(job))) if own is None else own()


@contextmanager
def append_output(path: Path) -> Iterator[None]:
    """Appends what this process prints, also from libraries, to a file; exceptions are written there too."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1)
    try:
        with file, _redirect_output(file):
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
def _redirect_output(file: IO[str]) -> Iterator[None]:
    _flush()
    saved = [os.dup(stream) for stream in (1, 2)]
    try:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        yield
    finally:
        _flush()
        for stream, copy in zip((1, 2), saved):
            os.dup2(copy, stream)
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
