"""Randomness that belongs to the training: seeded, saved with checkpoints, and never taken from the user."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from excite._core.checks import check_seed


def stream(seed: int, *numbers: int) -> int:
    """Seeds of independent streams from one seed."""
    return int(np.random.SeedSequence([check_seed(seed), *numbers]).generate_state(1)[0])


def capture(device: torch.device) -> dict[str, Any]:
    """The global random states that a training step can draw from."""
    generator_name, keys, *counters = np.random.get_state()  # noqa: NPY002 (the global state is what is meant)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [str(generator_name), [int(key) for key in keys], *(_plain(item) for item in counters)],
        "python": random.getstate(),
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restores the state of all random generators."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    generator_name, keys, *counters = state["numpy"]
    np.random.set_state((generator_name, np.array(keys, np.uint32), *counters))  # noqa: NPY002
    random.setstate(state["python"])


def reseed(seed: int, device: torch.device) -> None:
    """Restarts all global streams."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the global random states are those of the training; afterwards the user's are back."""
    before = capture(device)
    try:
        reseed(stream(seed, 0), device)
        yield
    finally:
        restore(before, device)


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Inside, weights are drawn on the CPU from `seed`; afterwards the global random state is as before."""
    before = torch.get_rng_state()
    try:
        # Not torch.manual_seed: that would also move the generators of every GPU.
        torch.default_generator.manual_seed(stream(seed, 1))
        yield
    finally:
        torch.set_rng_state(before)


def _plain(item: Any) -> int | float:
    return float(item) if isinstance(item, float) else int(item)
