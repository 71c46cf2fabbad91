"""A run folder is created whole, locked while it is written to, and says how its run ended."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from excite.errors import InputError, RunError
from excite.runs import Run, folder, load_run
from excite.runs.lock import Lock

CONFIG = {"epochs": 3, "data": {"name": "digits"}}


@pytest.fixture
def run(tmp_path: Path):
    with Run.create(tmp_path / "run", CONFIG) as run:
        yield run


@pytest.mark.parametrize("held", [True, False])
def test_a_run_that_appears_meanwhile_is_the_one_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Another process creates the run between the check of this one and its own folder."""
    others = list[Run]()

    def build_late(*args: Any) -> Lock:
        monkeypatch.undo()
        others.append(Run.create(tmp_path / "run", CONFIG))
        if not held:
            others[0].close()
        return folder.build(*args)

    monkeypatch.setattr("excite.runs.run.lifecycle.build", build_late)
    if held:
        with pytest.raises(RunError, match="another process is writing"):
            Run.create(tmp_path / "run", CONFIG, resume=True)
    else:
        with Run.create(tmp_path / "run", CONFIG, resume=True) as run:
            assert run.resumed
    others[0].close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_second_writer_is_refused_and_a_reader_is_not(run: Run) -> None:
    with pytest.raises(RunError, match="another process is writing"):
        Run.open(run.path, "a")
    with pytest.raises(RunError, match="another process is writing"):
        Run.create(run.path, CONFIG, resume=True)
    assert load_run(run.path).status == "running"


def test_a_lock_on_a_folder_that_was_replaced_is_none(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process opened the lock of a folder; before it had it, the folder was moved away and made again by another."""
    flock, calls = fcntl.flock, 0
    old = tmp_path / "old"
    Run.create(old, {}).close()

    def replaced(descriptor: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.rename(old, tmp_path / "away")
            os.rename(run.path, old)  # locked by `run`
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(RunError, match="another process is writing"):
        Lock(old / "lock", old)
    os.rename(old, run.path)


def test_a_reader_cannot_write(run: Run) -> None:
    reader = load_run(run.path)
    for write in (
        lambda: reader.log(0, {"a/b": 1.0}), lambda: reader.save_checkpoint(0, {}), lambda: reader.set_status("done"),
        lambda: reader.write_json("a", 1), lambda: reader.rewind(0),
    ):  # fmt: skip
        with pytest.raises(RunError, match="open for reading"):
            write()


def test_a_closed_run_refuses_and_lets_the_next_writer_in(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", CONFIG)
    run.close("done")
    run.close()
    with pytest.raises(RunError, match="closed"):
        run.log(0, {"a/b": 1.0})
    with pytest.raises(RunError, match="closed"):
        run.frame()
    Run.open(tmp_path / "run", "a").close()
    assert load_run(tmp_path / "run").status == "done"


WRITER = """
import sys, time
from excite.runs import Run
run = Run.create(sys.argv[1], {})
step = 0
while True:
    run.log(step, {"a/b": float(step)})
    if step == 50:
        run.save_checkpoint(step, {"x": 1})
        print("ready", flush=True)
    step += 1
    time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_killed_writer_frees_the_run_and_leaves_it_readable(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    alive = load_run(tmp_path / "run")
    assert alive.status == "running"
    with pytest.raises(RunError, match="another process"):
        Run.open(tmp_path / "run", "a")
    process.kill()
    process.wait()
    assert alive.status == "stopped"
    with Run.open(tmp_path / "run", "a") as run:
        assert len(run.series("a/b")[0]) > 50
        assert run.load_checkpoint() == (50, {"x": 1})


def test_how_a_with_block_ends_is_recorded(tmp_path: Path) -> None:
    with Run.create(tmp_path / "done", {}):
        pass
    with pytest.raises(ZeroDivisionError), Run.create(tmp_path / "failed", {}):
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), Run.create(tmp_path / "stopped", {}):
        raise KeyboardInterrupt
    assert [load_run(tmp_path / name).status for name in ("done", "failed", "stopped")] == ["done", "failed", "stopped"]
    assert load_run(tmp_path / "failed").reason == "division by zero"


def test_an_existing_run_is_not_overwritten(run: Run) -> None:
    with pytest.raises(RunError, match="resume"):
        Run.create(run.path, CONFIG)


def test_resume_needs_the_same_config(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", CONFIG).close()
    with Run.create(tmp_path / "run", CONFIG, resume=True) as run:
        assert run.resumed
    with pytest.raises(RunError, match="epochs: 3 in the run, 4 now"):
        Run.create(tmp_path / "run", {**CONFIG, "epochs": 4}, resume=True)
    Run.open(tmp_path / "run", "a").close()  # the refusal let go of the lock


def test_an_empty_folder_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Run.create(tmp_path / "run", CONFIG) as run:
        assert not run.resumed


def test_creating_leaves_only_the_run(tmp_path: Path) -> None:
    Run.create(tmp_path / "a" / "run", CONFIG).close()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["run"]


def test_a_config_that_is_not_json_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="JSON"):
        Run.create(tmp_path / "run", {"x": object()})
    assert list(tmp_path.iterdir()) == []
