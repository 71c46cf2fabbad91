"""Time several things against each other: interleaved repeats, medians, and the spread."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch


def race(jobs: dict[str, Callable[[], object]], repeats: int, warm: int = 2) -> dict[str, list[float]]:
    """Seconds of each job, `repeats` times each, in turns, so that what else the machine does hits all alike."""
    for job in jobs.values():
        for _ in range(warm):
            job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(over: list[float], under: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile of the ratios of paired repeats."""
    ratios = [a / b for a, b in zip(over, under)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return middle, low, high


def machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}"
