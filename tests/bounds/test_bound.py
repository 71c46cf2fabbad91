"""A bound says what it needs, and says nothing where that fails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from excite.bounds import Assumption, Bound

HELD, FAILED, UNKNOWN = (Assumption("the data are separable", held) for held in (True, False, None))


def test_a_bound_holds_if_all_assumptions_were_checked_and_held():
    assert Bound("T", "the margin", 1.0, assumptions=(HELD,)).holds
    assert not Bound("T", "the margin", 1.0, assumptions=(HELD, UNKNOWN)).holds


@pytest.mark.parametrize(("value", "assumptions"), [(1.0, (HELD, FAILED)), (math.nan, (HELD,))])
def test_a_failed_assumption_or_nan_leaves_no_value(value, assumptions):
    bound = Bound("T", "the margin", value, terms={"λ": 2.0}, assumptions=assumptions)
    assert bound.value is None
    assert bound.terms == {"λ": 2.0}
    assert "no bound" in str(bound)


def test_an_unchecked_assumption_keeps_the_value_and_is_said():
    text = str(Bound("T", "the margin", 2.5, "lower", assumptions=(UNKNOWN,)))
    assert "the margin ≥ 2.5" in text
    assert "not checked: the data are separable" in text


def test_verdicts_of_numpy_count():
    for held in (np.float64(1) > 0, np.float64(1) < 0):
        bound = Bound("T", "the margin", 1.0, assumptions=(Assumption("the data are separable", held),))
        assert bound.holds is bool(held)
        assert (bound.value is None) is not bool(held)
