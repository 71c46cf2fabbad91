"""The demo: one small network trained three ways on handwritten digits, margins compared, a report written.

Eights and nines are not trivial to tell apart in scikit-learn's 8×8 images. Every seed is another split of the images and
other initial weights, the same for the three ways, so that they can be compared in pairs. The radius is the same at the
input and in every layer, as in figure 6 of the paper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from excite.jobs.training_job import TrainingJob
from excite.train.config import parse_config

CLASSES = (8, 9)
RADIUS = 0.03
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "input excited": {"radius": RADIUS, "layers": "input", "stages": 4, "bounds": [-1, 1]},
    "every layer excited": {"radius": RADIUS, "layers": "all", "stages": 4, "bounds": [-1, 1]},
}


def demo_jobs(out: Path, seeds: int, epochs: int) -> list[TrainingJob]:
    """Jobs of `excite demo`: three ways of training on the digits, `seeds` of each."""
    jobs = []
    for number, (variant, excitation) in enumerate(VARIANTS.items(), 1):
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
            folder = out / f"{number}-{variant.replace(' ', '-')}-{seed}"
            jobs.append(TrainingJob(variant, seed, folder, parse_config(settings)))
    return jobs
