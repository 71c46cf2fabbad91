"""The networks and points of `frequency`, its numbers against a slow training, and its whole path in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from excite import studies
from excite.bounds import bias_distance, bias_variance
from excite.errors import TrainingStopped
from excite.studies import runner
from excite.studies.computed import Jointly
from excite.studies.judging.verdicts import judge
from excite.studies.study import VariantResult
from excite.studies.trajectory.frequency import (
    FREQUENCIES,
    SCALES,
    STUDY,
    VARIANTS,
    claims,
    compute,
    network,
    points,
    thinned,
)
from excite.train import ensemble
from excite.train.batches import Shuffle
from studies.small import run_tiny

TINY = replace(SCALES["quick"], seeds=2, steps=1200)


def test_settings_are_the_authors() -> None:
    settings = STUDY.variants(SCALES["paper"])[3].config
    assert (settings["epochs"], settings["points"], settings["test"], settings["lr"]) == (3000, 100, 30, 1e-3)
    assert SCALES["paper"].seeds == 10
    model = network(0)
    assert [tuple(p.shape) for p in model.parameters()] == [
        (10, 10), (10,), (32, 10), (32,), (32, 32), (32,), (32, 32), (32,), (1, 32), (1,)
    ]  # fmt: skip
    assert torch.equal(model[1].weight, torch.eye(10))
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 9


def test_points_of_a_seed_differ_in_their_targets_only() -> None:
    (x, y, x_test, _), (x2, y2, x2_test, _) = points(0.25, 3), points(1.0, 3)
    assert torch.equal(x, x2)
    assert torch.equal(x_test, x2_test)
    assert not torch.equal(y, y2)
    assert (x.shape, x_test.shape) == ((100, 10), (30, 10))
    assert torch.linalg.matrix_rank(x) == 2
    assert 5 < x.norm(dim=1).max() <= 10 * 2**0.5


def test_numbers_are_those_of_a_slow_training() -> None:
    """Two networks of 200 steps by autograd: loss, length, variance, distance and test loss as the paper defines them."""
    settings = {**STUDY.variants(TINY)[2].config, "epochs": 2}
    found = compute([(settings, 0), (settings, 1)], "cpu", lambda share: None)
    for seed, outcome in enumerate(found):
        model, (x, y, x_test, y_test) = network(seed), points(0.75, seed)
        first = model[1]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        shuffle = Shuffle(100, 1, seed)
        biases, lengths, losses, tests = [first.bias.detach().clone()], [], [], []
        for _ in range(2):
            for at in shuffle.order():
                error = model(x[at : at + 1])[0, 0] - y[at]
                optimizer.zero_grad()
                (error**2 / 2).backward()
                optimizer.step()
                biases.append(first.bias.detach().clone())
                lengths.append(float((biases[-1] - biases[-2]).norm() / (1e-3 * error.detach().abs())))
                losses.append(float(error.detach() ** 2 / 2))
            tests.append(float((model(x_test)[:, 0] - y_test).detach().square().mean() / 2))
        b = torch.stack(biases).double()
        values = outcome.values
        assert values["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
        assert values["trajectory"] == pytest.approx(np.sum(lengths) / 2, rel=2e-3)  # float32: updates are differences
        assert values["total"] == pytest.approx(np.sum(lengths), rel=2e-3)
        assert values["test"] == pytest.approx(np.mean(tests), rel=1e-4)
        assert values["distance"] == pytest.approx(float((b[-1] - b[0]).norm()), rel=1e-4)
        assert values["variance"] == pytest.approx(float((b[:-1] - b[:-1].mean(0)).square().sum(1).mean()), rel=1e-4)
        assert outcome.detail["total"][-1] == pytest.approx(values["total"], rel=1e-4)
        assert "training loss" in outcome.flags[0]


@pytest.mark.slow
def test_corollaries_on_networks_of_the_study() -> None:
    """Corollary 2 below the variance, Corollary 3 above the distance; `pytest -s` prints how tight they are."""
    drawn = [points(omega, 0) for omega in FREQUENCIES]
    x, y = (torch.stack([d[k] for d in drawn]).double() for k in (0, 1))
    found = ensemble([network(0).double() for _ in drawn], x, y, epochs=20, seeds=[0] * 4, window=1)
    t = found.trajectory
    errors, steep = (2 * found.loss).sqrt(), t.length  # |f − y|; the first weight is the identity
    late = slice(1000, None)
    for i, omega in enumerate(FREQUENCIES):
        below = bias_variance(1e-3, errors[i, late].numpy(), steep[i, late].numpy(), 1.0, sgd=True)
        b = t.bias[i, 1000:]  # one more than steps
        variance = float((b - b.mean(0)).square().sum(1).mean())
        above = bias_distance(1e-3, errors[i].numpy(), steep[i].numpy(), 1.0, sgd=True)
        distance = float(t.distance[i, -1])
        assert below.value <= variance
        assert distance <= above.value
        assert above.value == pytest.approx(
            float(t.raw[i].sum()), rel=1e-9
        )  # an identity: the bound is the path itself
        print(f"ω = {omega}: variance over Corollary 2 {variance / below.value:.3g}, "
              f"Corollary 3 over distance {above.value / distance:.3g}")  # fmt: skip


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_tiny("frequency", TINY, tmp_path, monkeypatch)
    assert len(result.numbers) == 8
    loss = {n.variant: n.loss for n in result.numbers if n.seed == 0}
    assert loss[VARIANTS[0]] < loss[VARIANTS[3]]


@pytest.mark.slow
def test_more_repeats_add_to_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that are there already are not trained again, and the others end as if they had been with them."""
    monkeypatch.setitem(STUDY.scales, "quick", replace(TINY, steps=300))  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "save", lambda *a: None)  # drawing takes most of the time
    both = studies.run("frequency", seeds=2, out=tmp_path / "both")
    one = studies.run("frequency", seeds=1, out=tmp_path / "one")
    before = {p: p.stat().st_mtime_ns for p in one.folder.glob("*-0/result.json")}
    more = studies.run("frequency", seeds=2, out=tmp_path / "one")
    assert len(before) == 4
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in before.items())
    for a, b in zip(both.numbers, more.numbers):
        for name, value in a.values.items():
            assert b.values[name] == pytest.approx(value, rel=1e-3, nan_ok=True)


def test_a_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*a: object) -> None:
        raise RuntimeError("no room")

    broken = replace(STUDY, method=replace(STUDY.method, compute=Jointly(fails)))  # type: ignore[arg-type, type-var]
    monkeypatch.setitem(studies.STUDIES, "frequency", broken)
    with pytest.raises(TrainingStopped, match=r"no room.*and 11 more.*0 of 12"):
        studies.run("frequency", out=tmp_path / "out")


def test_curves_are_thinned_to_means() -> None:
    assert thinned(np.arange(10.0), 5) == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert thinned(np.arange(3.0)) == [0, 1, 2]


def test_claims_judge_what_they_say() -> None:
    def runs(values: list[float]) -> list[VariantResult]:
        names = ("epochs", "trajectory", "test", "variance", "distance", "total", "total_third", "total_fit")
        return [
            VariantResult(variant, s, dict.fromkeys(names, v)) for s in range(8) for variant, v in zip(VARIANTS, values)
        ]

    words = {tuple(v): [judge(c, runs(v)).word for c in claims(TINY)] for v in ([1.0, 2, 3, 4], [4.0, 3, 2, 1])}  # type: ignore[union-attr]
    assert set(words[1, 2, 3, 4]) == {"holds"}
    assert words[4, 3, 2, 1].count("fails") == len(claims(TINY)) - 1  # test loss and trajectory still agree
    mixed = {c.measure: judge(c, runs([1.0, 3, 2, 4])) for c in claims(TINY)}
    assert {v.word for m, v in mixed.items() if v is not None and "smallest ratio" in m} == {"fails"}
    assert {v.word for m, v in mixed.items() if v is not None and "smallest ratio" not in m} == {"holds"}
