"""Studies `conservation` and `conservation-real` at a size for tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from excite.probes import conservation
from excite.probes.conserved.update_terms import PARTS
from excite.studies.invariances import conservation_real
from excite.studies.invariances.conservation import CASES, KINDS, CasesScale, Net, claims, compute, name
from excite.studies.invariances.conservation_measures import (
    balances,
    forgotten,
    growth,
    imbalance,
    rate_of_decay,
    shares,
    sizes,
)
from excite.studies.study import VariantResult
from excite.studies.verdicts import judge
from studies.small import run_tiny


def nothing(share: float) -> None:
    pass


def case(number: int, relu: bool, **more: float) -> dict[str, float]:
    settings = {"case": number, "relu": relu, "steps": 40, "points": 8, "time": 0.2, "lr": 0.02, **more}
    return dict(compute(settings, 0, nothing).values)


@pytest.mark.parametrize("number", CASES)
def test_the_networks_of_the_cases_run_and_have_the_layers_they_are_about(number: int) -> None:
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
    assert words[:3] == ["holds"] * 3
    assert words[4:7] == ["holds"] * 3
    assert not {words[3], words[7]} & {"holds"}
    assert words[8] == "fails"


def test_one_variant_of_the_real_study(tmp_path: Path) -> None:
    tiny = conservation_real.RealScale(
        name="quick", seeds=1, steps=4, data="digits", width=4, stages=1, batch=8, images=40, words=""
    )
    (variant,) = [variant for variant in conservation_real.variants(tiny) if variant.name == "transformer, AdamW"]
    outcome = conservation_real.compute(variant.config, 0, "cpu", tmp_path, nothing)
    assert outcome.values["rest"] < 1e-5 < outcome.values["drift"]
    assert outcome.values["rescaling"] > 0.5
    assert {law["law"] for law in outcome.detail["laws"]} == {"matrix", "channel", "norm"}
    steps, laws = zip(*outcome.detail["balance"])
    assert steps == (0, 1, 2, 3, 4)
    assert all(found.keys() == laws[0].keys() and min(found.values()) > 0 for found in laws)


@pytest.mark.slow
def test_measures_of_a_network_that_only_decays() -> None:
    """Without gradients imbalance is forgotten at decay's own rate, and nothing else happens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    for setting in ({"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.02, **setting)
        with conservation(model, optimizer, x) as ledger:
            start = balances(ledger.read(), dict(model.named_parameters()))
            for _ in range(600):
                optimizer.zero_grad()
                (0 * model(x)).sum().backward()
                optimizer.step()
            reading = ledger.read()
        apart, left = imbalance(reading)
        assert apart == pytest.approx(left, rel=1e-9)
        assert forgotten(left, rate_of_decay(optimizer), 600) == pytest.approx(1, abs=0.02)
        assert growth(reading) == pytest.approx(left, rel=1e-9)
        assert balances(reading, dict(model.named_parameters())) == pytest.approx(start, rel=1e-9)
        found = sizes(reading)
        assert found["decay"] == pytest.approx(found["drift"], rel=1e-9)
        assert shares(reading) == pytest.approx({part: float(part == "decay") for part in PARTS}, abs=1e-9)


@pytest.mark.slow
def test_the_whole_path_of_conservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = CasesScale(name="quick", seeds=1, steps=5, points=4, time=0.05, words="tiny")
    run_tiny("conservation", tiny, tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_whole_path_of_conservation_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = conservation_real.RealScale(
        name="quick", seeds=1, steps=3, data="digits", width=4, stages=1, batch=8, images=40, words="tiny"
    )
    run_tiny("conservation-real", tiny, tmp_path, monkeypatch)
