"""Bad input: for each case an action, and what the error that refuses it has to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from excite.errors import ExciteError

Cases = dict[str, tuple[Callable[[], object], str]]


def refusing(cases: Cases) -> Callable[..., Any]:
    """A test that every case is refused, for the reason given."""

    @pytest.mark.parametrize("case", cases)
    def test(case: str) -> None:
        action, message = cases[case]
        with pytest.raises(ExciteError, match=message):
            action()

    return test
