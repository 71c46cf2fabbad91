"""One writer at a time; the lock is free when its process is gone, and names its holder."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from excite.errors import RunError
from excite.runs.lock import Lock, is_held

HOLD = "import sys; from pathlib import Path; from excite.runs.lock import Lock; l = Lock(Path(sys.argv[1]), 'x'); print('locked', flush=True); input()"


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = Lock(path, tmp_path)
    assert is_held(path)
    words = rf"another process is writing to .* \(process {os.getpid()} on {platform.node()}\): wait for it"
    with pytest.raises(RunError, match=words):
        Lock(path, tmp_path)
    lock.release()
    lock.release()
    assert not is_held(path)
    assert path.read_bytes() == b""
    Lock(path, tmp_path).release()


def test_a_missing_lock_file_is_not_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "lock")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_is_free_when_its_process_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RunError, match=rf"process {process.pid} on"):
        Lock(path, tmp_path)
    process.send_signal(how)
    process.communicate()
    assert not is_held(path)
    Lock(path, tmp_path).release()


def test_readers_that_check_do_not_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    path = tmp_path / "lock"
    Lock(path, tmp_path).release()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not is_held(path)


def test_lock_files_of_earlier_versions_name_no_holder(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=f"writing to {tmp_path}: wait"):
            Lock(path, tmp_path)
