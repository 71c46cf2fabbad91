"""The automatic radius on the demo's task: the built-in digits, for which the authors chose no radius."""

from __future__ import annotations

from functools import partial
from typing import Any

from excite.studies.beyond.margin_auto import beside_auto, claims
from excite.studies.by_margins import ByMargins, TrainingScale
from excite.studies.demo import CLASSES, RADIUS
from excite.studies.study import Study, Variant

SCALES: dict[str, TrainingScale] = {
    name: TrainingScale(
        name=name,
        train=None,
        test=None,
        epochs=100,
        batch=20,
        lr=0.1,
        seeds=seeds,
        points=100,
        sizes={},
        words=f"all digits 8 and 9, 100 epochs, {seeds} seeds, margins of 100 training and 100 test images",
    )
    for name, seeds in (("quick", 5), ("paper", 20))
}


def variants(scale: TrainingScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    return beside_auto(partial(settings, scale), RADIUS)


def settings(scale: TrainingScale, **changes: Any) -> dict[str, Any]:
    """Config of a training on the digits."""
    return {
        "data": {"name": "digits", "classes": list(CLASSES)},
        "model": {"name": "small-cnn"},
        "optimizer": {"name": "sgd", "lr": scale.lr, "momentum": 0.9, "dampening": 0.9},
        "epochs": scale.epochs,
        "batch": scale.batch,
        "watch": False,
        **changes,
    }


STUDY = Study(
    "digits-auto",
    "A radius that nobody tuned, on digits",
    "section 7.2 of Persistency of Excitation for Robustness of Neural Networks",
    "8×8 digits, eights against nines",
    ByMargins(data=(), splits=True),
    SCALES,
    variants,
    claims,
    (
        f"Chosen radii: {RADIUS} in the infinity norm, grown from zero in four stages.",
        'Radius "auto": relative to each layer\'s input, increased as long as the training data are fitted; see [the rule](../excitation.md).',
        "The constants of the rule were judged on these digits, on the first three seeds among others, so results here are optimistic.",
        "After the five seeds of scale `quick` two claims were undecided, and `excite study plan` gave 11 seeds; the 20 of scale `paper`, which "
        "include them, were fixed before.",
    ),
    asks="automatic radii on digits",
    seconds={"quick": 230},
    sources=("persistency:section 7.2",),
)
