"""Study `margin-auto`: what its claims compare."""

from __future__ import annotations

import math

import pytest

from excite.studies.beyond.margin_auto import ALL, AUTO, INPUT, PLAIN, claims, variants
from excite.studies.excitation.planes_and_horses import RADIUS, SCALES
from excite.studies.study import VariantResult
from excite.train.config import parse_config


def test_radii_of_the_variants() -> None:
    configs = {v.name: parse_config({**v.config, "seed": 0}) for v in variants(SCALES["quick"])}
    assert configs[PLAIN].excitation is None
    assert [configs[name].excitation.radius for name in (INPUT, ALL, AUTO)] == [RADIUS, RADIUS, "auto"]


def test_margins_are_compared_as_a_ratio() -> None:
    by_hand, auto = (VariantResult(name, 0, {"margin_test": m}) for name, m in ((ALL, 0.2), (AUTO, 0.19)))
    ratio = claims(SCALES["quick"])[-1].effect
    assert ratio({ALL: by_hand, AUTO: auto}) == pytest.approx(-0.05)
    assert math.isnan(ratio({ALL: VariantResult(ALL, 0, {"margin_test": 0.0}), AUTO: auto}))
