"""What a metric may be called."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1 << 14)  # the same few names at every step
def is_name(name: object) -> bool:
    """Whether this is a name such as 'norm' or 'rank/effective/conv1'."""
    return isinstance(name, str) and bool(name) and name.isprintable() and name == name.strip("/ ")
