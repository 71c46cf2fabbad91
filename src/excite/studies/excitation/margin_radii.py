"""Figure 5: how large a perturbation of every layer should be."""

from __future__ import annotations

from excite.studies.by_margins import ByMargins, TrainingScale
from excite.studies.excitation.planes_and_horses import SCALES, TASK, excited, settings
from excite.studies.study import Claim, Study, Variant

RADII = (0.005, 0.010, 0.020)
_SOURCE = "Persistency of excitation, section 6, figure 5"
_SMALL, _MIDDLE, _LARGE = (f"radius {radius:.3f}" for radius in RADII)


def variants(scale: TrainingScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    grown = [Variant(f"radius {radius:.3f}", settings(scale, excitation=excited(radius))) for radius in RADII]
    return [Variant("plain", settings(scale)), *grown]


def claims(scale: TrainingScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [
        Claim(
            "a small perturbation of every layer, 0.005, makes the margin of training images larger",
            _SOURCE,
            f"median training margin, {_SMALL} minus plain",
            ("plain", _SMALL),
            lambda n: n[_SMALL].margin_train - n["plain"].margin_train,
            above=0.0,
        ).quoting(
            "applying a small persistently-exciting perturbation increases the margin of the training data conspicuously",
            "weaker",
        ),
        Claim(
            "a large perturbation, 0.020, keeps the training error from reaching zero",
            _SOURCE,
            f"training error, {_LARGE} minus plain",
            ("plain", _LARGE),
            lambda n: n["plain"].accuracy_train - n[_LARGE].accuracy_train,
            above=0.0,
        ).quoting("the training error is not able to reach zero when the perturbation is relative large"),
        Claim(
            "the largest perturbation, 0.020, gives the largest margin of test images",
            _SOURCE,
            f"median test margin, {_LARGE} minus the best of the other variants",
            ("plain", _SMALL, _MIDDLE, _LARGE),
            lambda n: n[_LARGE].margin_test - max(n[variant].margin_test for variant in ("plain", _SMALL, _MIDDLE)),
            above=0.0,
        ).quoting("the same magnitude of perturbation attains the largest margin on the test data"),
    ]


STUDY = Study(
    "margin-radii",
    "Every layer excited, with three radii",
    "figure 5 of Persistency of Excitation for Robustness of Neural Networks",
    TASK,
    ByMargins(),
    SCALES,
    variants,
    claims,
    ("The perturbations are balls in the infinity norm before every affine layer, grown from zero in four stages.",),
    asks="do radii widen margins?",
    seconds={"quick": 590, "paper": 37800},
    sources=("persistency:figure 5",),
)
