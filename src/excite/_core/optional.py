"""Optional packages: a clear line where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from excite.errors import ExciteError


class MissingPackage(ExciteError, ImportError):
    """A package that this integration needs is not installed."""


def need(module: str, extra: str) -> Any:
    """The module, or one line that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise MissingPackage(f"{package} does not import: {error}") from error
        raise MissingPackage(f"{package} is not installed: pip install 'excite[{extra}]'") from error
