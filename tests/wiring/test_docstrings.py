"""The examples in the docstrings of excite.wiring and excite.lipschitz run, and print what they say where they say it."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch
from torch import nn

import excite
from excite import lipschitz, wiring

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name) for module in (wiring, lipschitz) for name in module.__all__
}
WITH_EXAMPLES = sorted(name for name, item in PUBLIC.items() if ">>> " in (item.__doc__ or ""))


class Lenient(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_example_of_a_docstring_runs(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    names = {"torch": torch, "nn": nn, "excite": excite, "model": model, "x": torch.randn(5, 4)}
    names |= vars(wiring) | vars(lipschitz)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(PUBLIC[name]) or "", names, name, None, None)
    printed: list[str] = []
    results = doctest.DocTestRunner(Lenient(), optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=printed.append)
    assert results.attempted > 0
    assert not results.failed, "".join(printed)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_say_what_they_take_and_return(name: str) -> None:
    item, text = PUBLIC[name], inspect.getdoc(PUBLIC[name]) or ""
    assert text
    assert text.splitlines()[0].endswith((".", ":"))
    if inspect.isfunction(item):
        assert "Args:" in text
        assert "Returns:" in text
    elif inspect.isclass(item):
        assert "Attributes:" in text or "Args:" in text
