"""Warnings that point at the user's line."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import torch

# With a separator behind, so that a script beside the package (excite_demo.py) is the user's.
_OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (str(Path(__file__).parent), torch.__file__))


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn` at the innermost line that is neither Excite's nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)


def say(message: str) -> None:
    """One line for the user: to the logger "excite" if it takes such lines, else to standard error.

    ``logging.getLogger("excite").setLevel("WARNING")`` silences it.
    """
    log = logging.getLogger("excite")
    if log.isEnabledFor(logging.INFO):
        log.info("%s", message)
    elif log.level == logging.NOTSET:  # nobody has chosen a level
        print(f"excite: {message}", file=sys.stderr)
