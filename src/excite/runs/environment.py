"""Environment of a run: versions, machine and commit. No host names, no user names, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import numpy as np
import torch

from excite._version import __version__


def environment() -> dict[str, Any]:
    """Returns versions and the kind of machine, without names of hosts, users or paths."""
    cuda = torch.cuda.is_available()
    return {
        "excite": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _uncommitted(),
    }


def _git(*arguments: str) -> str | None:
    """State of the git repository of the current folder; None without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def _uncommitted() -> bool | None:
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return None if changes is None else bool(changes)
