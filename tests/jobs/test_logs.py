"""Output of a job in its log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from excite.errors import InputError
from excite.jobs.logs import append_output, log_path, log_to_file
from jobs.sleep_jobs import jobs


def test_output_and_tracebacks_are_appended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = jobs(tmp_path, "fine")[0]
    assert log_path(job) == str(tmp_path / "logs/fine-0.log")
    with pytest.raises(RuntimeError), log_to_file(job):
        os.write(1, b"from this process\n")  # `print` itself is captured by pytest
        subprocess.run([sys.executable, "-c", "print('from another process')"], check=True)
        raise RuntimeError("a bug")
    with pytest.raises(InputError), log_to_file(job):
        raise InputError("radius: expected a number")
    lines = Path(log_path(job)).read_text().splitlines()
    assert lines[:2] == ["from this process", "from another process"]
    assert "Traceback (most recent call last):" in lines
    assert lines[-2:] == ["RuntimeError: a bug", "radius: expected a number"]  # our own errors without a traceback
    print("on the terminal")
    assert capfd.readouterr().out == "on the terminal\n"


def test_an_empty_log_is_removed(tmp_path: Path) -> None:
    with append_output(tmp_path / "logs/empty.log"):
        pass
    assert list((tmp_path / "logs").iterdir()) == []
