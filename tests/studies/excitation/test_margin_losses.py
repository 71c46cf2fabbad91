"""Study `margin-losses`: its two trainings and claims."""

from __future__ import annotations

import pytest

from excite.studies.excitation.margin_losses import claims, variants
from excite.studies.excitation.planes_and_horses import SCALES
from excite.studies.study import VariantResult
from excite.train.config import parse_config


def test_the_two_losses() -> None:
    squared, entropy = (parse_config({**v.config, "seed": 0}) for v in variants(SCALES["paper"]))
    assert (squared.batch, entropy.batch) == (50, 1)
    assert (squared.excitation, entropy.excitation) == (None, None)
    assert entropy.loss == "cross-entropy"


def test_margins_of_training_and_test_images_are_compared() -> None:
    result = VariantResult("squared error", 0, {"margin_train": 0.03, "margin_test": 0.02})
    small, smaller = (c for c in claims(SCALES["quick"]) if c.variants == ("squared error",))
    assert small.effect({"squared error": result}) == 0.02
    assert smaller.effect({"squared error": result}) == pytest.approx(0.01)
