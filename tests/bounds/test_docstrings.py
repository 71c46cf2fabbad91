"""Every public name of `excite.bounds` says what it takes and returns, and its example runs."""

from __future__ import annotations

import doctest
import inspect

import pytest

from excite import bounds

FUNCTIONS = [name for name in bounds.__all__ if inspect.isfunction(getattr(bounds, name))]


@pytest.mark.parametrize("name", bounds.__all__)
def test_examples(name: str) -> None:
    found = getattr(bounds, name)
    for test in doctest.DocTestFinder(recurse=False).find(found, name, globs={}):
        assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections(name: str) -> None:
    text = inspect.getdoc(getattr(bounds, name)) or ""
    assert all(section in text for section in ("\nArgs:", "\nReturns:", "\nExample:")), name
    for parameter in inspect.signature(getattr(bounds, name)).parameters:
        assert f"\n    {parameter}: " in text, f"{name}: {parameter} is not documented"
