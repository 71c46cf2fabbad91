"""Ctrl-C and SIGTERM end a training after the step under way, with a checkpoint.

In the middle of a step the weights are neither those before nor those after it: a handler only takes a note, and the loop
looks at it between steps. Handlers are installed by Excite's own commands and worker processes; a library leaves those of
other people's programs alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_requested = False
_trainings = 0  # loops that look at the note


@contextmanager
def stop_signals(*numbers: signal.Signals, insist: bool = True) -> Iterator[None]:
    """Inside, these signals (SIGINT and SIGTERM by default) stop a training at the end of its step.

    A second signal (unless `insist` is False), or one outside of a training, raises KeyboardInterrupt at once. In other threads than the main one signals
    cannot be handled: nothing is installed there.
    """
    global _requested
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: object) -> None:
        global _requested
        if not _trainings or (_requested and insist):
            raise KeyboardInterrupt
        _requested = True

    wanted = numbers or (signal.SIGINT, signal.SIGTERM)
    # One that is ignored stays so: that is how shells and nohup keep Ctrl-C from what runs in the background.
    before = {
        number: signal.signal(number, note) for number in wanted if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _requested = False


@contextmanager
def between_steps() -> Iterator[None]:
    """A loop that asks `stop_requested` after every step."""
    global _trainings
    _trainings += 1
    try:
        yield
    finally:
        _trainings -= 1


def stop_requested() -> bool:
    return _requested
