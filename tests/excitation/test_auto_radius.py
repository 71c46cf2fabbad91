"""The controller of radius "auto": grows while the fit holds, backs off before a collapse, travels with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from excite.errors import InputError
from excite.excitation import PersistentExcitation, Stages
from excite.excitation.auto_radius import BACK, CALM, GROW, START, TENSE, Auto
from excite.train.config import parse_config
from excite.train.from_config import train


def settled(strain: float, spread: float | None = 1.0, steps: int = 100) -> Auto:
    auto = Auto()
    auto.factor.fill_(0.1)
    for _ in range(steps):
        auto.observe(torch.tensor(strain), None if spread is None else torch.tensor(spread))
    return auto


def test_the_rule() -> None:
    grown = settled(CALM / 2, steps=200)
    assert float(grown.factor) > 0.1
    before = float(grown.factor)
    grown.observe(torch.tensor(CALM / 2), torch.tensor(1.0))
    assert float(grown.factor) == pytest.approx(min(1.0, before * (1 + GROW)))
    tense = settled(1.0, steps=5)
    before = float(tense.factor)
    tense.observe(torch.tensor(1.0), torch.tensor(1.0))
    assert float(tense.factor) == pytest.approx(before * (1 - BACK))
    assert float(settled(1.0, steps=1000).factor) == pytest.approx(START)
    flat = settled(CALM / 2, spread=0.0, steps=300)
    assert float(flat.factor) < 0.1  # outputs without variance, however small the error
    between = settled((CALM + TENSE) / 2, steps=200)
    before = float(between.factor)
    between.observe(torch.tensor((CALM + TENSE) / 2), None)
    assert float(between.factor) == before


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_batch_that_tells_nothing_is_passed_over(odd: float) -> None:
    auto = settled(0.2)
    before = float(auto.strain)
    auto.observe(torch.tensor(odd), torch.tensor(odd))
    assert float(auto.strain) == pytest.approx(before)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def data(n: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] + 0.3 * x[:, 1] > 0).long()


@pytest.mark.slow
def test_it_trains_where_a_radius_too_large_collapses() -> None:
    x, y = data()
    accuracies = {}
    for radius in ("auto", 2.0):
        model = network()
        pe = PersistentExcitation(model, radius)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)
        for step in range(600):
            at = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:50]
            optimizer.zero_grad()
            pe.loss(x[at], y[at]).backward()
            optimizer.step()
        accuracies[radius] = float((pe.decide(x) == y).float().mean())
        if radius == "auto":
            assert float(pe.radius.factor) > 5 * START  # type: ignore[union-attr]
            assert set(pe.radii()) == {"0", "2", "4"}
            assert pe.measured()["radius/0"] == pytest.approx(pe.radii()["0"])
    assert accuracies["auto"] > 0.93
    assert accuracies[2.0] < 0.8


def test_looking_does_not_move_the_controller() -> None:
    x, y = data(20)
    pe = PersistentExcitation(network(), "auto")
    pe.loss(x, y)
    before = pe.state_dict()
    pe.extremes(x)
    pe.predict(x)
    with torch.no_grad():
        pe.loss(x, y)
    assert pe.state_dict() == before


@pytest.mark.parametrize(
    ("options", "outputs"),
    [({"classes": 3}, 3), ({"classes": 3}, 2), ({"classes": 3, "loss": "cross-entropy"}, 3),
     ({"classes": 3, "hierarchy": "balanced"}, 2), ({"loss": "cross-entropy"}, 1)],
)  # fmt: skip
def test_all_targets(options: dict[str, Any], outputs: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))
    pe = PersistentExcitation(model, "auto", **options)
    x, y = torch.randn(12, 4), torch.arange(12) % options.get("classes", 2)
    before = float(pe.radius.strain)  # type: ignore[union-attr]
    pe.loss(x, y).backward()
    assert float(pe.radius.strain) != before  # type: ignore[union-attr]


def test_the_trivial_error_is_that_of_the_best_constant() -> None:
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    model = nn.Linear(4, 3)
    for loss in ("squared", "cross-entropy"):
        target = PersistentExcitation(model, "auto", classes=3, loss=loss).target  # type: ignore[arg-type]
        constant = torch.zeros(1, 3, requires_grad=True)
        optimizer = torch.optim.LBFGS([constant], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

        def closure(
            target: Any = target, constant: torch.Tensor = constant, optimizer: Any = optimizer
        ) -> torch.Tensor:
            optimizer.zero_grad()
            error: torch.Tensor = target.errors(constant.expand(6, 3), labels).mean()
            error.backward()
            return error

        optimizer.step(closure)
        assert float(target.trivial(labels)) == pytest.approx(float(closure().detach()), rel=1e-4)


def test_refusals() -> None:
    with pytest.raises(InputError, match="grows by itself"):
        Stages("auto")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="relative to the signal already"):
        PersistentExcitation(network(), "auto", kind="multiplicative")
    with pytest.raises(InputError, match="expected 'auto'"):
        PersistentExcitation(network(), "automatic")  # type: ignore[arg-type]


def test_runs_keep_it_and_continue_it(tmp_path: Path) -> None:
    config = parse_config({
        "data": {"name": "digits", "classes": [8, 9], "train": 60, "test": 20}, "model": {"name": "small-cnn"},
        "excitation": {"radius": "auto"}, "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 3, "batch": 20,
    })  # fmt: skip

    def stop(phase: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    whole = train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", progress=stop)
    parts = train(config, tmp_path / "parts")
    for name in ("excitation/factor", "excitation/strain", "excitation/radius/0", "loss/step"):
        assert whole.series(name)[1].tolist() == parts.series(name)[1].tolist()
    whole.close()
    parts.close()
