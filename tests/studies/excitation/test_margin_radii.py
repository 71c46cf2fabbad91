"""Study `margin-radii`: radii and claims."""

from __future__ import annotations

from excite.studies.excitation.margin_radii import RADII, claims, variants
from excite.studies.excitation.planes_and_horses import SCALES
from excite.studies.study import VariantResult
from excite.train.config import parse_config


def test_every_radius_is_trained() -> None:
    configs = [parse_config({**v.config, "seed": 0}) for v in variants(SCALES["paper"])]
    assert [c.excitation and c.excitation.radius for c in configs] == [None, *RADII]


def test_claims_hold_where_margins_grow_with_the_radius() -> None:
    names = [v.name for v in variants(SCALES["quick"])]
    results = {
        name: VariantResult(name, 0, {"margin_train": 0.1 * (i + 1), "margin_test": 0.1 * (i + 1), "gap": 1 / (i + 1)})
        for i, name in enumerate(names)
    }
    largest = next(claim for claim in claims(SCALES["quick"]) if "largest perturbation" in claim.text)
    assert largest.above == 0
    assert largest.effect(results) > 0
