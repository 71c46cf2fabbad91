"""The page about conservation shows what the code prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "conservation.md").read_text(encoding="utf-8")


def test_the_printed_example_is_real() -> None:
    code, printed = re.search(r"```python\n(.*?)```\n```text\n(.*?)```", PAGE, re.DOTALL).groups()  # type: ignore[union-attr]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code, {})

    def without_rounding(text: str) -> str:
        return re.sub(r"\d\.\de-1\d", "rounding", text)

    assert without_rounding(shown.getvalue()) == without_rounding(printed)
