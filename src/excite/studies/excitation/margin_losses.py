"""Figure 4: plain training, by squared error or by cross-entropy, leaves small margins on test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from excite.studies.by_margins import ByMargins, TrainingScale
from excite.studies.excitation.planes_and_horses import SCALES, TASK, cross_entropy, settings
from excite.studies.numbers import Numbers
from excite.studies.study import Arm, Claim, Study

LARGE = 16 / 255  # 8/255 of pixels in [0, 1], the size CIFAR-10 networks are usually asked to stand
_SOURCE = "Persistency of excitation, section 6, figure 4"


def arms(scale: TrainingScale) -> list[Arm]:
    return [Arm("squared error", settings(scale)), Arm("cross-entropy", cross_entropy(scale))]


def claims(scale: TrainingScale) -> list[Claim]:
    return [claim(arm) for arm in ("squared error", "cross-entropy") for claim in (_small, _smaller)]


def _small(arm: str) -> Claim:
    effect: Callable[[Mapping[str, Numbers]], float] = lambda n: n[arm].margin_test  # noqa: E731
    return Claim(
        f"training by {arm} does not give test images a large margin: half of them are misclassified within "
        f"{LARGE:.3f}, the usual 8/255 of the pixel range",
        _SOURCE,
        "median test margin",
        (arm,),
        effect,
        below=LARGE,
    )


def _smaller(arm: str) -> Claim:
    effect: Callable[[Mapping[str, Numbers]], float] = lambda n: n[arm].margin_train - n[arm].margin_test  # noqa: E731
    return Claim(
        f"after training by {arm} the margin of test images is smaller than that of training images",
        _SOURCE,
        "median training margin minus median test margin",
        (arm,),
        effect,
        above=0.0,
    )


STUDY = Study(
    "margin-losses",
    "Margins after plain training, by squared error and by cross-entropy",
    "figure 4 of Persistency of Excitation for Robustness of Neural Networks",
    TASK,
    ByMargins(),
    SCALES,
    arms,
    claims,
    (
        "Squared error: one output, batches of 50, momentum 0.9 damped by 0.9. Cross-entropy, as the authors have it: two "
        "outputs, one image at a time, learning rate 0.001, momentum 0.9 undamped. The two arms differ in more than the loss.",
    ),
)
