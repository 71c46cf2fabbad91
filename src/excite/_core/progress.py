"""Progress of a computation: called as `progress(phase, done, total)`. Jobs report a `JobProgress` instead."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
