"""Warnings point at the user's line."""

import warnings

from excite._core.warn import warn_user


def test_the_line_is_the_callers():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_user("look here", DeprecationWarning)
    assert caught[0].filename == __file__
    assert caught[0].category is DeprecationWarning
