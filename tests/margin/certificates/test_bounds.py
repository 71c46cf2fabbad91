"""The kinds of lower bounds that `margins` takes."""

from __future__ import annotations

import pytest
from benchmarks.exact_margins import random_net

from excite.margin import SearchOptions, margins


@pytest.mark.parametrize("kind", ["lipschitz", "interval", "linear", "exact"])
def test_each_kind_names_its_source(kind: str) -> None:
    model, x, y, how = random_net(2)
    found = margins(model, x, y, **how, options=SearchOptions(certify=kind, evidence=False, steps=10, restarts=1))
    words = {"lipschitz": "Lipschitz", "interval": "interval", "linear": "relaxation", "exact": "mixed-integer"}
    assert words[kind] in found.certified_why
    assert (found.lower <= found.values).all()
