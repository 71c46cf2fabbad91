"""The demo: one small network trained three ways on handwritten digits, margins compared, a report written.

Eights and nines are not trivial to tell apart in scikit-learn's 8×8 images. Every seed is another split of the images and
other initial weights, the same for the three ways, so that they can be compared in pairs. The radius is the same at the
input and in every layer, as in figure 6 of the paper.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from excite.config import TrainConfig, parse_config
from excite.measuring import load_model, measure
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
    for arm, excitation in ARMS.items():
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
            folder = out / f"{arm.replace(' ', '-')}-{seed}"
            found.append(Task(arm, seed, folder, parse_config(settings)))
    return found


def finished(task: Task) -> bool:
    """Whether the task's folder holds everything already, so that a stopped demo goes on where it was."""
    needed = [f"artifacts/{name}.json" for name in ("margins-train", "margins-test", "summary")]
    return all((task.folder / name).exists() for name in ["run.json", *needed])


def perform(task: Task, tell: Callable[[str, str, float], None]) -> None:
    """Train and measure one arm; `tell(folder, phase, share done)`."""
    name, whole = task.folder.name, _TRAINING + _MEASURING

    def training(phase: str, done: int, total: int) -> None:
        tell(name, "training", _TRAINING / whole * done / max(total, 1))

    def measuring(phase: str, done: int, total: int) -> None:
        tell(name, "measuring margins", (_TRAINING + _MEASURING * done / max(total, 1)) / whole)

    train(task.config, task.folder, progress=training).close()
    measure(load_model(task.folder), arm=task.arm, progress=measuring)
    tell(name, "done", 1.0)


def perform_all(todo: list[Task], workers: int, tell: Callable[[str, str, float], None]) -> None:
    """All tasks on worker processes of one thread each: small networks do not profit from more."""
    if workers <= 1:
        for task in todo:
            perform(task, tell)
        return
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
        messages = manager.Queue()
        running: set[Future[None]] = {pool.submit(_work, task, messages) for task in todo}
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
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _one_thread() -> None:
    torch.set_num_threads(1)


def _work(task: Task, messages: Any) -> None:
    last = -1.0

    def tell(name: str, phase: str, share: float) -> None:
        nonlocal last
        if share - last >= 0.02 or share >= 1:
            last = share
            messages.put((name, phase, share))

    perform(task, tell)
