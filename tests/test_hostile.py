"""Hostile calls of the public API (`benchmarks.hostile`): each ends in a finite answer or in one line that says what to do."""

from __future__ import annotations

import pytest
from benchmarks.hostile import CALLS, Outcome, outcomes, valid_call


def _bad(calls: int, seed: int) -> list[Outcome]:
    return [one for one in outcomes(calls, seed) if not one.good]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "load_run"])
def test_valid_arguments_give_an_answer(name):
    valid_call(name)


def test_hostile_calls_end_well():
    assert not _bad(20 * len(CALLS), seed=0)


@pytest.mark.slow
def test_many_hostile_calls_end_well():
    assert not _bad(200 * len(CALLS), seed=1)
