"""Every projection of a transformer has a law or a true reason why not; laws hold under flow and in the ledger."""

from __future__ import annotations

import pytest
from benchmarks.transformer_laws import ledger_rest, rates, rows, without_eps

import excite
from models import FAMILIES, transformer

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")
PARTS = {"query", "key", "value", "output", "MLP in", "MLP out"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_has_a_law_or_a_reason(family):
    model, x = transformer(family)
    found = rows(excite.trace(model, x, output="logits").groups)
    named = {part for made, read, _, _ in found for part in f"{made}, {read}".split(", ")}
    assert named >= PARTS | ({"MLP gate"} if family in ("llama", "qwen3") else set())
    reasons = [why for _, _, law, why in found if law == "none"]
    assert all("positively homogeneous" in why or "used in several ways" in why for why in reasons)
    laws = {(made, read): law for made, read, law, _ in found}
    assert laws["value", "output"] == "matrix"
    if family != "qwen3":
        assert laws["query", "key"] == ("channel" if family == "llama" else "matrix")


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rates_under_gradient_flow(family, kernel):
    model, x = transformer(family, kernel, layers=2)
    groups = excite.trace(without_eps(model), x, output="logits").groups
    assert rates(model, x, groups) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_ledger_rest_over_100_steps(family):
    rest, holds = ledger_rest(family)
    assert holds
    assert rest < 1e-12
