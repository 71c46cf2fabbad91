"""Variants, results and claims."""

from __future__ import annotations

import math

import pytest

from excite.errors import InputError
from excite.studies.study import STRENGTHS, Ladder, Scale, Variant, VariantResult, gap_claim


def test_names_of_folders() -> None:
    assert Variant("radius 0.01, every layer", {}).slug == "radius-0.01-every-layer"


def test_results_are_read_by_name_and_written_as_before() -> None:
    result = VariantResult("plain", 3, {"gap": 0.5, "loss": math.nan}, ("doubtful",))
    assert result.gap == 0.5
    with pytest.raises(AttributeError, match="no number 'margin'"):
        _ = result.margin
    assert result.plain() == {"arm": "plain", "seed": 3, "gap": 0.5, "loss": None, "flags": ("doubtful",)}
    assert Scale(name="quick", seeds=1, words="", every_variant=True).plain()["every_arm"]


def test_a_gap_is_compared_in_the_claimed_direction() -> None:
    results = {"plain": VariantResult("plain", 0, {"gap": 0.3}), "excited": VariantResult("excited", 0, {"gap": 0.1})}
    claim = gap_claim("smaller", "source", "excited", "plain")
    assert claim.effect(results) == pytest.approx(-0.2)
    assert (claim.below, claim.above) == (0.0, None)
    assert gap_claim("wider", "source", "excited", "plain", wider=True).above == 0.0


def test_a_ladder_grows_from_each_to_the_next() -> None:
    results = {str(i): VariantResult(str(i), 0, {"length": length}) for i, length in enumerate((1.0, 10.0, 5.0))}
    ladder = Ladder(("0", "1", "2"), "rung")
    assert ladder.each("grows", "source", "length", "length").effect(results) == pytest.approx([1.0, math.log10(0.5)])
    assert ladder.ends("grows", "source", "length", "length").effect(results) == pytest.approx(math.log10(5.0))


def test_a_claim_quotes_the_paper_and_says_how_strongly() -> None:
    claim = gap_claim("smaller", "source", "excited", "plain")
    assert (claim.ours, claim.reading) == (True, STRENGTHS["ours"])
    quoted = claim.quoting("much lower", "weaker")
    assert (quoted.quote, quoted.ours, quoted.reading) == ("much lower", False, STRENGTHS["weaker"])
    assert claim.quoting("what is plotted", "ours").ours
    with pytest.raises(InputError, match=r"strength: expected one of 'as said', .* got 'louder'"):
        claim.quoting("much lower", "louder")  # type: ignore[arg-type]
