"""Study `step-size`: the descent against autograd, the slopes against excite.lipschitz, the claims on planted numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from excite.lipschitz import local
from excite.studies.computed import StepsScale
from excite.studies.excitation.step_size import BY_STEP, BY_WIDTH, SHIFTED, STUDY, claims, compute, descend, start
from excite.studies.judging.verdicts import judge
from excite.studies.study import VariantResult
from studies.small import nothing, run_tiny

TINY = StepsScale(name="quick", seeds=1, steps=30, words="tiny")


def test_descent_is_the_loop_one_would_write_with_autograd() -> None:
    data, weights = start(3, 5, 0.7)
    found = descend(data, weights, 0.004, 40, nothing)
    x, y = (torch.from_numpy(part) for part in data)
    slow = [torch.from_numpy(weight.copy()).requires_grad_() for weight in weights]
    for _ in range(40):
        rows, bias, outer = slow
        loss = ((x @ rows.T + bias).relu() @ outer - y).square().sum() / 2
        for weight, slope in zip(slow, torch.autograd.grad(loss, slow)):
            weight.data -= 0.004 * slope
    for fast, weight in zip(found, slow):
        torch.testing.assert_close(torch.from_numpy(fast), weight.detach(), rtol=0, atol=1e-13)


def test_the_constant_is_a_slope_of_the_network() -> None:
    settings = {"steps": 200, "width": 6, "step": 0.004, "offset": 0.0}
    values = compute(settings, 0, nothing).values
    data, weights = start(0, 6, 0.0)
    rows, bias, outer = (torch.from_numpy(part) for part in descend(data, weights, 0.004, 200, nothing))
    first, last = torch.nn.Linear(2, 6), torch.nn.Linear(6, 1, bias=False)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), last).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (rows, bias, outer[None])):
            parameter.copy_(value)
    assert values["constant"] >= float(local(model, torch.from_numpy(data[0])).max()) - 1e-12
    assert values["constant"] <= float(rows.norm(dim=1) @ outer.abs())


def test_seeds_without_a_bound_are_left_out() -> None:
    bounds = [c for c in claims(TINY) if c.measure.startswith("bound")]
    names = tuple(dict.fromkeys((*BY_STEP, *BY_WIDTH, SHIFTED)))
    values = {"stated": math.nan, "constant": 1.0, "mu": 1.0, "converged": 1.0}
    numbers = [VariantResult(name, seed, values) for name in names for seed in range(3)]
    assert [judge(claim, numbers).word for claim in bounds] == ["not tested"] * 3


def test_a_constant_that_grows_with_the_step_fails() -> None:
    claim = claims(TINY)[0]
    numbers = [
        VariantResult(name, seed, {"constant": (1 + at) * (1 + seed / 10), "converged": 1.0})
        for at, name in enumerate(BY_STEP)
        for seed in range(4)
    ]
    numbers = [n if n.variant != BY_STEP[-1] else VariantResult(n.variant, n.seed, {"constant": n.constant + 0.1 * n.seed, "converged": 1.0}) for n in numbers]  # fmt: skip
    assert judge(claim, numbers).word == "fails"


@pytest.mark.slow
def test_the_whole_path_of_step_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run_tiny("step-size", TINY, tmp_path, monkeypatch).verdicts) == len(STUDY.claims(TINY))
