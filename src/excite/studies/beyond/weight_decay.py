"""Weight decay beside excitation on the built-in digits: does shrinking the weights give the margins that excitation gives?

Not an experiment of the papers. Theorem 6 of *Persistency of excitation* shows that for linear regression the two are the
same up to the choice of strength; this study measures them on a small convolutional network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from excite.studies.by_margins import ByMargins, TrainingScale
from excite.studies.study import Claim, Study, Variant, VariantResult, gap_claim

DECAYS = (0.01, 0.03)
RADIUS = 0.03
PLAIN, EXCITED = "plain", "every layer excited"
DECAYED = {decay: f"weight decay {decay:g}" for decay in DECAYS}
_SOURCE = "not in the papers"

SCALES = {
    name: TrainingScale(
        name=name, seeds=seeds, train=None, test=None, epochs=epochs, batch=20, lr=0.1, points=100, sizes={},
        words=f"all digits 8 and 9, {epochs} epochs, {seeds} seeds, margins of 100 training and 100 test images",
    )
    for name, seeds, epochs in (("quick", 5, 30), ("paper", 20, 100))
}  # fmt: skip


def variants(scale: TrainingScale) -> list[Variant]:
    """Variants that are trained at a scale."""

    def train(decay: float = 0.0, excitation: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "data": {"name": "digits", "classes": [8, 9]},
            "model": {"name": "small-cnn"},
            "optimizer": {"name": "sgd", "lr": scale.lr, "momentum": 0.9, "dampening": 0.9, "weight_decay": decay},
            "excitation": excitation,
            "epochs": scale.epochs,
            "batch": scale.batch,
            "watch": False,
        }

    excited = {"radius": RADIUS, "layers": "all", "steps": 4, "stages": 4, "bounds": [-1.0, 1.0]}
    return [
        Variant(PLAIN, train()),
        *(Variant(name, train(decay)) for decay, name in DECAYED.items()),
        Variant(EXCITED, train(excitation=excited)),
    ]


def claims(scale: TrainingScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""

    def wider(variant: str, others: tuple[str, ...], text: str, measure: str) -> Claim:
        def effect(n: Mapping[str, VariantResult]) -> float:
            best = max(n[other].margin_test for other in others)
            return math.log2(n[variant].margin_test / best) if min(n[variant].margin_test, best) > 0 else math.nan

        return Claim(text, _SOURCE, f"log2 of the median test margin, {measure}", (variant, *others), effect, above=0.0)

    decayed, strongest = tuple(DECAYED.values()), DECAYED[DECAYS[-1]]
    return [
        gap_claim("exciting every layer narrows the gap between training and test margins", _SOURCE, EXCITED, PLAIN),
        *(gap_claim(f"so does {name}", _SOURCE, name, PLAIN) for name in decayed),
        wider(EXCITED, (PLAIN,), "exciting every layer widens the test margins", f"{EXCITED} over {PLAIN}"),
        wider(strongest, (PLAIN,), f"so does {strongest}", f"{strongest} over {PLAIN}"),
        wider(EXCITED, decayed, "excitation widens them more than any of the decays", f"{EXCITED} over the best decay"),
    ]


STUDY = Study(
    "weight-decay",
    "Weight decay beside excitation",
    "no figure of the papers",
    "8×8 digits, eights against nines",
    ByMargins(data=(), splits=True),
    SCALES,
    variants,
    claims,
    (
        f"Radius {RADIUS} at the input and in every layer, grown from zero in four stages, as in the demo.",
        f"Weight decay of torch.optim.SGD: {', '.join(f'{decay:g}' for decay in DECAYS)} times each weight is added to its gradient. "
        "Neither these numbers nor the radius were tuned.",
    ),
    asks="decay or excitation?",
    seconds={"quick": 100},
)
