"""Studies `conservation` and `conservation-real` at a size for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from excite.studies.invariances.conservation import (
    CASES,
    KINDS,
    RTOL,
    CasesScale,
    Net,
    claims,
    compute,
    flow,
    name,
    start,
)
from excite.studies.judging.verdicts import judge
from excite.studies.study import VariantResult
from excite.wiring import trace
from studies.small import nothing, run_tiny


def case(number: int, relu: bool, **more: float) -> dict[str, float]:
    settings = {"case": number, "relu": relu, "steps": 40, "points": 8, "time": 0.2, "lr": 0.02, **more}
    return dict(compute(settings, 0, nothing).values)


@pytest.mark.parametrize("number", CASES)
def test_networks_of_the_cases_have_the_layers_of_the_case(number: int) -> None:
    model = Net(number, relu=True)
    x = torch.randn(3, 2, 6) if number in (2, 5, 6) else torch.randn(3, 4)
    assert model(x).shape == (3,)
    assert all(hasattr(model, layer) for layer in CASES[number][1])


@pytest.mark.slow
def test_case_6_on_and_off_the_diagonal() -> None:
    linear, relu = case(6, relu=False), case(6, relu=True)
    for found in (linear, relu):
        assert found["diagonal"] < 1e-14 < 1e-8 < found["slack"]
        assert found["flow_left"] < 1e-7
        assert found["flow_diagonal"] < 1e-5
        assert found["printed"] > 1e-4
    assert linear["off"] < 1e-14
    assert linear["flow_off"] < 1e-8
    assert relu["off"] > 1e-4
    assert relu["flow_off"] > 1e-5


@pytest.mark.parametrize(("act", "conserved"), [(torch.nn.ReLU(), True), (torch.nn.Tanh(), False)])
def test_the_diagonal_of_a_flow_is_a_test_that_can_fail(act: torch.nn.Module, conserved: bool) -> None:
    """What remains once descent steps are explained is rounding and integration for a ReLU; tanh has no such law."""
    model, x, y = start({"case": 1, "relu": True, "points": 8}, 0)
    groups = [group for group in trace(model, x).groups if group.producers[0].layer == "a"]
    model.act = act
    left = flow(model, x, y, groups, 0.2)[2]
    assert (0 < left < 1e-8) if conserved else left > 1e-5


@pytest.mark.slow
def test_what_a_flow_leaves_falls_with_its_tolerance() -> None:
    """Up to eight kinks at once with dependent normals: the diagonal moves by the integrator's error, not by more."""
    model, x, y = start({"case": 4, "relu": True, "points": 20}, 3)
    groups = [group for group in trace(model, x).groups if group.producers[0].layer == "U"]
    for rtol in (RTOL, RTOL / 4, RTOL / 16):
        assert flow(model, x, y, groups, 10.0, rtol)[2] < rtol


def test_claims_are_judged_as_they_should() -> None:
    tiny = CasesScale(name="quick", seeds=2, steps=1, points=1, time=1.0, words="")
    numbers = []
    for seed in range(2):
        for number in CASES:
            for kind in KINDS:
                off = 1e-16 if kind == "linear" else 0.1 * (1 + seed)
                values = {
                    "diagonal": 1e-16,
                    "flow_diagonal": 1e-9,
                    "flow_left": 1e-9,
                    "off": off,
                    "flow_off": off,
                    "printed": 0.1 + 0.01 * seed,
                }
                numbers.append(VariantResult(name(number, kind), seed, values))
    words = [verdict.word for claim in claims(tiny) if (verdict := judge(claim, numbers)) is not None]
    assert words[:3] == ["exact"] * 3
    assert words[4:7] == ["exact"] * 3
    assert not {words[3], words[7]} & {"holds"}
    assert words[8] == "fails"


@pytest.mark.slow
def test_the_whole_path_of_conservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = CasesScale(name="quick", seeds=1, steps=5, points=4, time=0.05, words="tiny")
    run_tiny("conservation", tiny, tmp_path, monkeypatch)
