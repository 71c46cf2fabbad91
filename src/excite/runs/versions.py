"""Versions of the formats on disk: an older one is read, a newer one is refused by name."""

from __future__ import annotations

from typing import Any

from excite._core.checks import is_whole
from excite._version import __version__
from excite.errors import RunError


class NewerVersion(RunError):
    """Written by a newer Excite than this one."""


def check_version(what: object, found: Any, known: int) -> int:
    """The version that `what` says it has, at most `known`."""
    if isinstance(found, str) and found.isdecimal():  # the header of a checkpoint holds text
        found = int(found)
    if not is_whole(found) or found < 1:
        raise RunError(f"{what} is damaged: its version is {found!r}")
    if found > known:
        raise NewerVersion(
            f"{what} has format version {found}; Excite {__version__} reads versions up to {known}: upgrade Excite to open it"
        )
    return found
