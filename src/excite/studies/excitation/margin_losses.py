"""Figure 4: plain training, by squared error or by cross-entropy, leaves small margins on test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from excite.studies.by_margins import ByMargins, TrainingScale
from excite.studies.excitation.planes_and_horses import SCALES, TASK, cross_entropy, settings
from excite.studies.study import Claim, Study, Variant, VariantResult

LARGE = 16 / 255  # 8/255 of pixels in [0, 1], the size CIFAR-10 networks are usually asked to stand
_NEITHER = "neither the squared-error loss nor the cross-entropy loss is effective in providing a large margin for the unseen test data"
_SOURCE = "Persistency of excitation, section 6, figure 4"


def variants(scale: TrainingScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    return [Variant("squared error", settings(scale)), Variant("cross-entropy", cross_entropy(scale))]


def claims(scale: TrainingScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [claim(variant) for variant in ("squared error", "cross-entropy") for claim in (_small, _smaller)]


def _small(variant: str) -> Claim:
    effect: Callable[[Mapping[str, VariantResult]], float] = lambda n: n[variant].margin_test  # noqa: E731
    return Claim(
        f"training by {variant} does not give test images a large margin: half of them are misclassified within "
        f"{LARGE:.3f}, the usual 8/255 of the pixel range",
        _SOURCE,
        "median test margin",
        (variant,),
        effect,
        below=LARGE,
    ).quoting(_NEITHER, "threshold")


def _smaller(variant: str) -> Claim:
    effect: Callable[[Mapping[str, VariantResult]], float] = lambda n: n[variant].margin_train - n[variant].margin_test  # noqa: E731
    return Claim(
        f"after training by {variant} the margin of test images is smaller than that of training images",
        _SOURCE,
        "median training margin minus median test margin",
        (variant,),
        effect,
        above=0.0,
    ).quoting(_NEITHER, "ours")


STUDY = Study(
    "margin-losses",
    "Margins after plain training, by squared error and by cross-entropy",
    "figure 4 of Persistency of Excitation for Robustness of Neural Networks",
    TASK,
    ByMargins(),
    SCALES,
    variants,
    claims,
    (
        "Squared error: one output, batches of 50, momentum 0.9 damped by 0.9. Cross-entropy, as the authors have it: two "
        "outputs, one image at a time, learning rate 0.001, momentum 0.9 undamped. The two variants differ in more than the loss.",
    ),
    asks="test margins of two losses",
    seconds={"quick": 290, "paper": 12100},
    sources=("persistency:figure 4",),
)
