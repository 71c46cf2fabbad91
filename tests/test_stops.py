"""Commands that are stopped at random moments and continued end with the bits of undisturbed ones; `python -m benchmarks.stops` in small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are forked as on Linux")
def test_stopped_commands_end_with_the_same_bits(tmp_path: Path) -> None:
    words = ["--stops", "15", "--seed", "11", "--per-job", "5", "--cold", "0", "--keep", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.stops", *words], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | | 15 | 15 | 15 | |" in done.stdout
