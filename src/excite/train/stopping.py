"""Ctrl-C and SIGTERM end a training after the current step, with a checkpoint.

In the middle of a step the weights are neither those before nor those after it: the handler only sets a flag, and the loop
checks it between steps. Handlers are installed by Excite's own commands and worker processes; the library does not touch
those of the user's program.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_requested = False
_loops = 0  # loops that check the flag


@contextmanager
def stop_signals(
    *numbers: signal.Signals, insist: bool = True, ignore: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Context in which signals stop a training at the end of its step, with a checkpoint.

    A second signal, or one outside of a training, raises KeyboardInterrupt at once. Python handles signals in the main thread
    only: in other threads nothing is installed.

    Args:
        numbers: Signals to handle. Default: SIGINT and SIGTERM.
        insist: Whether a second signal raises KeyboardInterrupt at once.
        ignore: Called when a signal arrives; True ignores it.
    """
    global _requested
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: object) -> None:
        global _requested
        if ignore():
            return
        if not _loops or (_requested and insist):
            raise KeyboardInterrupt
        _requested = True

    signals = numbers or (signal.SIGINT, signal.SIGTERM)
    # One that is ignored stays so: that is how shells and nohup keep Ctrl-C from what runs in the background.
    before = {
        number: signal.signal(number, request) for number in signals if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _requested = False


@contextmanager
def between_steps() -> Iterator[None]:
    """Context of a loop that checks `stop_requested` after every step."""
    global _loops
    _loops += 1
    try:
        yield
    finally:
        _loops -= 1


def stop_requested() -> bool:
    """Returns whether a signal has requested a stop."""
    return _requested
