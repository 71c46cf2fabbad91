"""Local constants against explicit Jacobians."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite.lipschitz import local
from models import CASES, build, same_state, state_of

FLOATS = [name for name, case in CASES.items() if not case.tokens]


def jacobian(model: nn.Module, point: Tensor, pick: object) -> Tensor:
    """(outputs, inputs), the slow way."""
    model.eval()
    full = torch.autograd.functional.jacobian(lambda p: pick_output(model(p[None]), pick).reshape(-1), point)  # type: ignore[no-untyped-call]
    return full.reshape(full.shape[0], -1)


@pytest.mark.parametrize("name", [n for n in FLOATS if n != "papers"])
@pytest.mark.parametrize("norm", ["2", "inf", "1"])
def test_local_constant_is_the_norm_of_the_jacobian(name: str, norm: str) -> None:
    model, x = build(name)
    before = state_of(model)
    found = local(model, x, norm, output=CASES[name].pick)
    assert same_state(before, state_of(model))
    order = {"2": 2, "inf": math.inf, "1": 1}[norm]
    expected = [torch.linalg.matrix_norm(jacobian(model, point, CASES[name].pick), ord=order) for point in x]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-9, atol=1e-12)


def test_local_constant_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("linear-classes", batch=7)
    whole = local(model, x)
    monkeypatch.setattr("excite.lipschitz.local_constants._MAX_ENTRIES", 31)
    torch.testing.assert_close(local(model, x), whole)
    assert local(model, x[:0]).shape == (0,)
