"""The demo: one small network trained three ways on handwritten digits, margins compared, a report written.

Eights and nines are not trivial to tell apart in scikit-learn's 8×8 images. Every seed is another split of the images and
other initial weights, the same for the three ways, so that they can be compared in pairs. The radius is the same at the
input and in every layer, as in figure 6 of the paper.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from excite.config import TrainConfig, parse_config
from excite.measuring import PARTS, artifact_name, load_model, measure
from excite.runs import load_run
from excite.training import train

CLASSES = (8, 9)
RADIUS = 0.03
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "input excited": {"radius": RADIUS, "layers": "input", "stages": 4, "bounds": [-1, 1]},
    "every layer excited": {"radius": RADIUS, "layers": "all", "stages": 4, "bounds": [-1, 1]},
}
_TRAINING, _MEASURING = 3, 1  # shares of a task's time, for the progress bar


@dataclass(frozen=True)
class Task:
    """One training and its measurement."""

    arm: str
    seed: int
    folder: Path
    config: TrainConfig


def tasks(out: Path, seeds: int, epochs: int) -> list[Task]:
    found = []
    for number, (arm, excitation) in enumerate(ARMS.items(), 1):
        for seed in range(seeds):
            settings = {
                "data": {"name": "digits", "classes": list(CLASSES), "seed": seed},
                "model": {"name": "small-cnn"},
                "excitation": excitation,
                "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.9},
                "epochs": epochs,
                "batch": 20,
                "seed": seed,
                "watch": 20,
            }
            folder = out / f"{number}-{arm.replace(' ', '-')}-{seed}"
            found.append(Task(arm, seed, folder, parse_config(settings)))
    return found


def finished(task: Task) -> bool:
    """Whether the task's folder holds everything already, so that a stopped demo goes on where it was."""
    if not (task.folder / "run.json").exists():
        return False
    with load_run(task.folder) as run:
        same = run.config == task.config.model_dump(mode="json")
        needed = [*(artifact_name("inf", part) for part in PARTS), "summary"]
        return same and run.status == "done" and all((run.path / f"artifacts/{name}.json").exists() for name in needed)


def perform(task: Task, tell: Callable[[str, str, float], None]) -> None:
    """Train and measure one arm; `tell(folder, phase, share done)`."""
    name, whole = task.folder.name, _TRAINING + _MEASURING

    def training(phase: str, done: int, total: int) -> None:
        tell(name, "training", _TRAINING / whole * done / max(total, 1))

    def measuring(phase: str, done: int, total: int) -> None:
        before = 0.5 if phase.endswith("test") else 0.0
        tell(name, "measuring margins", (_TRAINING + _MEASURING * (before + 0.5 * done / max(total, 1))) / whole)

    train(task.config, task.folder, progress=training).close()
    measure(load_model(task.folder), arm=task.arm, progress=measuring)
    tell(name, "done", 1.0)


def perform_all(todo: list[Task], workers: int, tell: Callable[[str, str, float], None]) -> None:
    """All tasks, on worker processes of one thread each."""
    if workers <= 1:
        for task in todo:
            perform(task, tell)
        return
    context = multiprocessing.get_context("spawn")
    manager = SyncManager(ctx=context)
    manager.start(_ignore_interrupts)
    with manager, ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        messages, stop = manager.Queue(), manager.Event()
        running: set[Future[None]] = {pool.submit(_work, task, messages, stop) for task in todo}
        try:
            while running:
                done, running = wait(running, timeout=0.1)
                while True:
                    try:
                        tell(*messages.get_nowait())
                    except queue.Empty:
                        break
                for future in done:
                    future.result()
        except BaseException:
            stop.set()  # workers end at their next message, and leave runs that can be continued
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _ignore_interrupts() -> None:
    # Ctrl-C reaches every process of the terminal; only the first one is to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _start_worker() -> None:
    _ignore_interrupts()
    torch.set_num_threads(1)  # small networks do not profit from more


def _work(task: Task, messages: Any, stop: Any) -> None:
    last = -1.0

    def tell(name: str, phase: str, share: float) -> None:
        nonlocal last
        if share - last >= 0.01 or share >= 1:
            last = share
            messages.put((name, phase, share))
            if stop.is_set():
                raise KeyboardInterrupt

    perform(task, tell)
