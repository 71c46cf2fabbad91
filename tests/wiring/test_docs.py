"""The page about wiring shows what the code prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

from excite.wiring import trace
from models import build

PAGE = (Path(__file__).parents[2] / "docs" / "wiring.md").read_text(encoding="utf-8")


def test_the_printed_examples_are_real() -> None:
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n((?:(?!```).)*)```\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    for code, printed in examples:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(code, names)
        assert shown.getvalue() == printed


def test_the_formula_for_what_is_conserved_works() -> None:
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def conserved" in code]
    names: dict[str, object] = {}
    exec(code, names)
    model, x = build("mlp")
    group = trace(model, x).groups[0]
    found = names["conserved"](group, dict(model.named_parameters()))  # type: ignore[operator]
    first, second = model[0], model[2]  # type: ignore[index]
    by_hand = first.weight.square().sum(1) + first.bias.square() - second.weight.square().sum(0)
    torch.testing.assert_close(found, by_hand)
