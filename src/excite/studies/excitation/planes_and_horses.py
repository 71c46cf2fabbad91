"""The task of the papers' experiments: CIFAR-10 planes against horses, the authors' network and settings.

Pixels in [−1, 1], planes are 0 and horses 1. The scale "paper" is what the authors did; "quick" is the same network on
fewer images and fewer epochs. Seeds determine the initial weights and the order of the images; the images stay the same.
"""

from __future__ import annotations

from typing import Any

from excite.studies.by_margins import TrainingScale

RADIUS = 0.02
HIDDEN = ["3", "7", "9", "11"]  # the affine layers of "papers-cnn" behind the first
BOUNDS = [-1.0, 1.0]

TASK = "CIFAR-10, planes against horses"
SCALES: dict[str, TrainingScale] = {
    "quick": TrainingScale(
        name="quick",
        train=1000,
        test=1000,
        epochs=12,
        batch=50,
        lr=0.5,
        seeds=3,
        points=100,
        sizes={"half the data": 500, "twice the data": 2000},
        every_variant=False,
        words=(
            "1,000 training and 1,000 test images instead of 10,000 and 2,000, 12 epochs instead of 40, learning rate 0.5 "
            "instead of 0.1 for squared error, 3 seeds instead of 10, margins of 100 training and 100 test images"
        ),
    ),
    "paper": TrainingScale(
        name="paper",
        train=None,
        test=None,
        epochs=40,
        batch=50,
        lr=0.1,
        seeds=10,
        points=2000,
        sizes={"2,500 images": 2500, "5,000 images": 5000},
        every_variant=True,
        words=(
            "the authors' settings: all 10,000 training images, 40 epochs, 10 seeds; margins of all 2,000 test images and of "
            "2,000 training images, evenly spaced"
        ),
    ),
}


def settings(scale: TrainingScale, **changes: Any) -> dict[str, Any]:
    """A plain training by squared error at this scale, with `changes`."""
    return {
        "data": {"name": "cifar10", "classes": ["airplane", "horse"], "train": scale.train, "test": scale.test},
        "model": {"name": "papers-cnn"},
        "optimizer": {"name": "sgd", "lr": scale.lr, "momentum": 0.9, "dampening": 0.9},
        "epochs": scale.epochs,
        "batch": scale.batch,
        "watch": False,
        "checkpoint_every": f"{max(1, scale.epochs // 4)} epochs",
        **changes,
    }


def excited(radius: float, layers: str | list[str] = "all") -> dict[str, Any]:
    """Algorithm 1: four signed steps, the radius growing from zero in four stages."""
    return {"radius": radius, "layers": layers, "steps": 4, "stages": 4, "bounds": BOUNDS}


def cross_entropy(scale: TrainingScale) -> dict[str, Any]:
    """The authors' twin: two outputs, single images, small steps."""
    optimizer = {"name": "sgd", "lr": 1e-3, "momentum": 0.9}
    return settings(scale, loss="cross-entropy", batch=1, optimizer=optimizer)


def with_images(scale: TrainingScale, count: int) -> dict[str, Any]:
    """Config of a training on `count` images."""
    base = settings(scale)
    return {**base, "data": {**base["data"], "train": count}}
