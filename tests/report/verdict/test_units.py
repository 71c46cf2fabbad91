"""Sizes of perturbations in words."""

import math
from types import SimpleNamespace

import pytest

from excite.report.verdict.units import describe, fraction, short

PIXELS = SimpleNamespace(low=0.0, high=1.0, pixels=True)
SYMMETRIC = SimpleNamespace(low=-1.0, high=1.0, pixels=True)
OTHER = SimpleNamespace(low=-1.0, high=2.0, pixels=False)


@pytest.mark.parametrize(
    ("value", "norm", "unit", "text"),
    [
        (9 / 255, "inf", PIXELS, "9/255 per pixel"),
        (18 / 255, "inf", SYMMETRIC, "9/255 per pixel"),
        (0.4 / 255, "inf", PIXELS, "0.4/255 per pixel"),
        (1.26 / 255, "inf", PIXELS, "1.3/255 per pixel"),
        (0.12, "inf", OTHER, "0.12 per input value (4 % of their range)"),
        (0.003, "inf", OTHER, "0.003 per input value (0.1 % of their range)"),
        (0.12, "inf", None, "0.12 per input value"),
        (0.5, "2", PIXELS, "0.5 in Euclidean distance (2-norm)"),
        (123.4, "2", None, "123 in Euclidean distance (2-norm)"),
        (math.inf, "inf", PIXELS, "no size that was tried"),
    ],
)
def test_phrases(value, norm, unit, text):
    assert describe(value, norm, unit) == text


def test_short_forms_and_fractions():
    assert short(0.12, "inf", OTHER) == "0.12"
    assert short(9 / 255, "inf", PIXELS) == "9/255 per pixel"
    assert short(math.inf, "inf", PIXELS) == "not reached"
    assert fraction(0.5, "inf", SYMMETRIC) == 0.25
    assert fraction(0.5, "2", PIXELS) is None
    assert fraction(0.5, "inf", None) is None
