"""Certified lower bounds below, margins found above: the truth lies between."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from excite._core.calls import pick_output
from excite.errors import InputError
from excite.margin import SearchOptions, margins
from excite.margin.certificates.lipschitz_radii import certified_radii
from margin.networks import BOUNDS, trained
from models import CASES, build


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.tokens])
def test_certified_is_never_above_what_was_found(name: str, norm: str) -> None:
    model, x = build(name, batch=8)
    model.eval()
    f = pick_output(model(x), CASES[name].pick).detach()
    y = (f.reshape(-1) > 0.5).long() if f.numel() == len(x) else f.argmax(1)
    found = margins(
        model, x, y, norm=norm, output=CASES[name].pick, options=SearchOptions(evidence=False, steps=20, restarts=2)
    )
    if found.certified is None:
        assert found.certified_why
        return
    # recomputed without the cut at the values, so that a wrong bound would show
    constant = float(found.certified_why.split("bound ")[1].split()[0])
    f = f.reshape(-1) if f.numel() == len(x) else f
    radii = certified_radii(f, y, 0.5, constant * 1.001, norm)  # the text has four digits
    assert (radii <= found.values * (1 + 1e-9)).all()
    assert (radii > 0).all()


@pytest.mark.slow
def test_certified_is_tight_for_a_linear_model() -> None:
    model, x = build("linear", batch=20)
    for norm in ("inf", "2"):
        found = margins(model, x, (model(x)[:, 0] > 0.5).long(), norm=norm)
        torch.testing.assert_close(found.certified, found.values, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("norm", "factor"), [("inf", 2.0), ("2", math.sqrt(2.0))])
def test_the_factors_for_classes_are_attained(norm: str, factor: float) -> None:
    # f(x) = (x1, x2) has constant 1 in both norms; x = (1, 0) is decided otherwise beyond (1/2, 1/2)
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = margins(model, x, torch.tensor([0]), norm=norm, options=SearchOptions(lipschitz=1.0))
    assert float(found.certified[0]) == pytest.approx(1 / factor, rel=1e-3)
    assert float(found.values[0]) == pytest.approx(1 / factor, rel=1e-3)


@pytest.mark.slow
def test_misclassified_points_have_no_certificate() -> None:
    model, x, y = trained("mlp")
    found = margins(model, x, 1 - y, bounds=BOUNDS, options=SearchOptions(evidence=False))
    assert (found.certified[found.values == 0] == 0).all()


@pytest.mark.slow
def test_a_given_constant_that_is_too_small_is_refused() -> None:
    model, x, y = trained("mlp")
    with pytest.raises(InputError, match="not a Lipschitz constant"):
        margins(model, x, y, bounds=BOUNDS, options=SearchOptions(lipschitz=1e-3, evidence=False))
    with pytest.raises(InputError, match="lipschitz"):
        margins(model, x, y, options=SearchOptions(lipschitz=-1.0))


def test_why_there_is_no_certificate_is_said() -> None:
    model, x = build("transformer")
    found = margins(model, x, torch.zeros(len(x)), options=SearchOptions(evidence=False, steps=3))
    assert found.certified is None
    assert "attention" in found.certified_why
    assert (
        margins(
            model, x, torch.zeros(len(x)), options=SearchOptions(evidence=False, steps=3, certify=False)
        ).certified_why
        == "not requested"
    )
