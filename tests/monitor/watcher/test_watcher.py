"""What goes wrong in long trainings: kills, full disks, locked databases, two writers, ten thousand steps."""

import gc
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc
import warnings

import pytest
import torch
from torch import nn

import excite
from excite import RunError
from excite.probes import Loss
from models import state_of

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo", "scipy", "excite.monitor.watch", "excite.probes"])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))


def train(watch, model, optimizer, steps, progress=None):
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        watch.step(loss)
        if progress is not None:
            progress(step + 1)


def endless(folder, progress):
    """Trains for ever and writes the number of steps done, and when, beside the run."""
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    descriptor = os.open(progress, os.O_WRONLY | os.O_CREAT)

    def done(step):
        os.pwrite(descriptor, f"{step:12d} {time.time():20.6f}\n".encode(), 33 * step)

    with excite.watch(model, torch.zeros(4, 5), folder, optimizer, every={"rank": 10}) as watch:
        train(watch, model, optimizer, 10**9, done)


def killed(folder, moments):
    """Kill a training after each of these seconds; every time the run must be whole and recent."""
    for number, after in enumerate(moments):
        path, progress = folder / f"run{number}", folder / f"progress{number}"
        process = FORKS.Process(target=endless, args=(str(path), str(progress)))
        process.start()
        patience = time.time() + 120
        while not progress.exists() and time.time() < patience and process.is_alive():
            time.sleep(0.01)
        time.sleep(after)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if not path.exists():  # killed before there was a run
            assert not progress.read_bytes()
            continue
        with excite.load_run(path) as run:
            assert run.status == "stopped"
            assert sqlite3.connect(path / "metrics.db").execute("PRAGMA integrity_check").fetchone() == ("ok",)
            logged = run.series("loss/step")[0].tolist() if "loss/step" in run.names() else []
        assert logged == list(range(1, len(logged) + 1)), "no gaps"
        when = {
            int(line.split()[0]): float(line.split()[1])
            for line in progress.read_text("latin-1").split("\n")
            if _whole(line)
        }
        if when and max(when) > len(logged):
            # A flush comes after a second, at the next step; the machine may be slow, so in time and not in steps.
            late = max(when.values()) - when[len(logged) + 1]
            assert late < 1.0 + 2 * _longest(when), f"{late:.2f} s of values are lost"


def _whole(line):
    return len(line.split()) == 2 and line.strip("\0").count(".") == 1


def _longest(when):
    times = [when[step] for step in sorted(when)]
    return max([b - a for a, b in zip(times, times[1:])], default=1.0) + 0.5  # noqa: RUF007


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    generator = random.Random(1)
    killed(tmp_path, [generator.uniform(0, 1.5) for _ in range(3)])


@pytest.mark.slow
def test_killed_at_fifty_random_moments(tmp_path):
    generator = random.Random(2)
    killed(tmp_path, [generator.uniform(0, 3) for _ in range(50)])


@pytest.mark.slow
def test_a_locked_database_holds_nobody_up_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("excite.runs.metrics._PATIENCE", 3600)
    monkeypatch.setattr("excite.monitor.writer._PAUSE", 0.2)
    monkeypatch.setattr("excite.monitor.buffer._SECONDS", 0.1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with excite.watch(model, run=tmp_path / "run", probes=[Loss()]) as watch:
            train(watch, model, optimizer, 3)
            watch.flush()
            other = sqlite3.connect(tmp_path / "run" / "metrics.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            train(watch, model, optimizer, 3)
            watch.flush()  # while the database is locked: waiting for it would take an hour
            other.execute("COMMIT")
            other.close()
            time.sleep(0.3)
            train(watch, model, optimizer, 3)
            watch.flush()
    said = [str(one.message) for one in caught if "values" in str(one.message)]
    assert len(said) == 2
    assert "values from step 4 on cannot be written for now, training continues" in said[0]
    assert "locked" in said[0]
    assert "again, nothing is lost" in said[1]
    run = excite.load_run(tmp_path / "run")
    assert run.status == "done"
    assert run.series("loss/step")[0].tolist() == list(range(1, 10))


FULL = """
import resource, sys, warnings, torch, excite
from excite.probes import Loss
warnings.simplefilter("always")
model = torch.nn.Linear(2, 1)
with excite.watch(model, run=sys.argv[1], probes=[Loss()]) as watch:
    for step in range(2000):
        if step == 100:
            watch.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        watch.step(float(step))
print("trained", watch.steps)
"""


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_training(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "run")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained 2000"
    assert "cannot be written for now, training continues" in done.stderr
    assert "measured values are lost" in done.stderr
    with excite.load_run(tmp_path / "run") as run:
        steps = run.series("loss/step")[0].tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 100


def writer(folder, answers):
    try:
        with excite.watch(nn.Linear(2, 1), run=folder, probes=[Loss()]) as watch:
            watch.step(1.0)
            time.sleep(1.0)
        answers.put("wrote")
    except RunError as error:
        answers.put(str(error))


@pytest.mark.slow
def test_of_two_processes_on_one_folder_the_second_is_refused(tmp_path):
    answers = FORKS.Queue()
    processes = [FORKS.Process(target=writer, args=(str(tmp_path / "run"), answers)) for _ in range(2)]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
    assert found[1] == "wrote" or found[0] == "wrote"
    refusal = next(one for one in found if one != "wrote")
    assert "holds a run already" in refusal
    assert excite.load_run(tmp_path / "run").series("loss/step")[0].tolist() == [1]


def endure(tmp_path, steps):
    """Everything on: memory after the first fifth is memory at the end, and hooks are counted."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    example, labels = torch.randn(8, 5), torch.tensor([0, 1] * 4)
    hooks = (
        state_of(model)["hooks"],
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
    )
    sizes, counts = {}, set()
    gc.collect()
    tracemalloc.start()
    try:
        with excite.watch(
            model, example, tmp_path / "run", optimizer, every=20, margin_batch=(example, labels), strict=True
        ) as watch:

            def look(step):
                if step in (steps // 5, steps):
                    watch.flush()
                    gc.collect()
                    sizes[step] = tracemalloc.get_traced_memory()[0]
                    counts.add((str(state_of(model)["hooks"]), len(optimizer._optimizer_step_post_hooks)))

            train(watch, model, optimizer, steps, look)
    finally:
        tracemalloc.stop()
    first, last = sizes.values()
    # The alerts' history is full by then, 1024 values a name; nothing else may grow.
    assert last - first < 40 * 0.8 * steps, f"{last - first} bytes more after {steps} steps"
    assert len(counts) == 1, "hooks piled up"
    assert hooks == (
        state_of(model)["hooks"], len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    )  # fmt: skip
    run = excite.load_run(tmp_path / "run")
    assert len(run.series("loss/step")[0]) == steps
    assert len(run.series("signs/changed")[0]) == steps // 20 + 1


@pytest.mark.slow
def test_six_thousand_steps_leave_no_memory_and_no_hooks(tmp_path):
    endure(tmp_path, 6000)


def test_what_is_on_its_way_does_not_come_back_after_a_step_back(tmp_path):
    with (
        excite.Run.create(tmp_path / "run", {}) as run,
        excite.watch(nn.Linear(2, 1), run=run, probes=[Loss()], strict=True) as watch,
    ):
        for _ in range(10):
            watch.step(1.0)
        kept = watch.state_dict()
        for _ in range(49):  # enough to be on its way
            watch.step(1.0)
        watch.load_state_dict(kept)
        run.rewind(10)
        watch.flush()
        assert run.series("loss/step")[0].tolist() == list(range(1, 11))


LATE = """
import atexit, sys, threading, time, torch, excite
from excite.probes import Loss
def train():
    with excite.watch(torch.nn.Linear(2, 1), run=sys.argv[1], probes=[Loss()], strict=True) as watch:
        for step in range(100):
            watch.step(float(step))
            time.sleep(0.002)
threading.Thread(target=train).start()
other = excite.watch(torch.nn.Linear(2, 1), run=sys.argv[2], probes=[Loss()], strict=True)
for step in range(60):
    other.step(float(step))
atexit.register(other.close)
"""


@pytest.mark.slow
def test_training_goes_on_when_the_main_thread_has_ended(tmp_path):
    folders = [tmp_path / "thread", tmp_path / "atexit"]
    done = subprocess.run(
        [sys.executable, "-c", LATE, *map(str, folders)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stderr == ""
    assert [len(excite.load_run(folder).series("loss/step")[0]) for folder in folders] == [100, 60]


def test_a_child_that_is_forked_while_values_are_written_ends(tmp_path):
    with excite.watch(nn.Linear(2, 1), run=tmp_path / "run", probes=[Loss()], strict=True) as watch:
        for _ in range(48):  # enough to be on its way
            watch.step(1.0)
        child = multiprocessing.get_context("fork").Process(target=watch._writer.close)
        child.start()
        child.join(60)
        assert child.exitcode == 0
