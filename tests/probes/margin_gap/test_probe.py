"""Margins of training and test points: closed forms, the gap against chance, time limits and bad input."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from excite import InputError
from excite.margin import Margins
from excite.probes import Loss, MarginGap, PaidSchedule
from excite.probes.base import StepContext
from excite.probes.margin_gap import probe as margin_gap_probe


def linear() -> tuple[nn.Module, dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """A linear model, points of two parts, and their distances to the hyperplane in the maximum norm."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    data, distances = {}, {}
    for part, n in (("train", 40), ("test", 30)):
        x = torch.randn(n, 3, dtype=torch.float64)
        with torch.no_grad():
            scores = model(x)[:, 0] - 0.5
            distance = scores.abs() / model.weight.norm(1)
        y = (scores > 0).long()
        y[:3] = 1 - y[:3]  # misclassified
        distance[:3] = 0
        data[part], distances[part] = (x, y), distance
    return model, data, distances


@pytest.mark.slow
def test_margins_of_a_linear_model_are_hyperplane_distances():
    model, data, distances = linear()
    probe = MarginGap(**data)
    for ctx in (StepContext(model, 0), StepContext(model, 7), StepContext(model, 9, final=True)):
        values = probe.measure(ctx)
        for part, distance in distances.items():
            assert values[f"median/{part}"] == pytest.approx(float(distance.quantile(0.5)), rel=2e-3)
            assert values[f"accuracy/{part}"] == pytest.approx(1 - 3 / len(distance))
            assert values[f"censored/{part}"] == 0
            assert values[f"points/{part}"] == len(distance)
        train, test = distances["train"].numpy(), distances["test"].numpy()
        grid = np.concatenate([train, test])
        curves = [np.searchsorted(np.sort(one), grid, side="right") / len(one) for one in (train, test)]
        assert values["gap"] == pytest.approx(np.abs(curves[0] - curves[1]).max(), abs=0.04)
        assert values["chance"] == pytest.approx(1.358 * np.sqrt(1 / 40 + 1 / 30), rel=1e-3)


@pytest.mark.slow
def test_the_end_is_measured_with_evidence_and_stored():
    model, data, _ = linear()
    probe, ctx = MarginGap(**data), StepContext(model, 9, final=True)
    probe.measure(ctx)
    stored = Margins.from_dict(ctx.artifacts["margins-inf-test"])
    assert len(stored) == 30
    assert stored.evidence is not None
    assert stored.evidence.draws == 1  # measured in several pieces, each by single passes
    assert stored.trusted, stored.flags
    assert ctx.artifacts["summary"]["accuracy"]["train"] == pytest.approx(37 / 40)
    assert [line.split(":")[0] for line in ctx.messages] == ["margins at the end"]
    assert "by chance up to" in ctx.messages[0]


class Timed(nn.Module):
    """A model and a clock that only its passes move: so many seconds each, whatever the number of points, or per point."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.model, self.now, self.last_began, self.per_pass, self.per_point = model, 0.0, 0.0, 0.0, 0.0
        monkeypatch.setattr(margin_gap_probe.time, "monotonic", lambda: self.now)

    def forward(self, x):
        self.last_began = self.now
        self.now += self.per_pass + self.per_point * len(x)
        return self.model(x)


def many() -> tuple[nn.Module, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(200, 3, dtype=torch.float64)
    return model, {part: (x, (model(x)[:, 0] > 0.5).long()) for part in ("train", "test")}


@pytest.mark.slow
def test_the_end_takes_no_longer_than_its_seconds(monkeypatch):
    model, data = many()
    slow = Timed(model, monkeypatch)
    measured = []
    for slow.per_point in (1e-5, 1e-3, 3e-3):
        began, ctx = slow.now, StepContext(slow, 9, final=True)
        values = MarginGap(**data, seconds=60).measure(ctx)
        assert slow.last_began - began <= 60  # the pass under way is the last
        measured.append(values["points/train"])
        assert ("fewer points than 500" in ctx.messages[0]) == (values["points/train"] < 200)
        assert Margins.from_dict(ctx.artifacts["margins-inf-test"]).evidence is not None
    assert measured[0] == 200 > measured[1] > measured[2] >= 8


@pytest.mark.slow
def test_a_model_that_becomes_slow_stops_in_time(monkeypatch):
    model, data = many()

    class Slowing(Timed):
        def forward(self, x):
            self.per_point = 1e-3 if self.now < 20 else 1.0  # from here on no prediction is right
            return super().forward(x)

    slow = Slowing(model, monkeypatch)
    values = MarginGap(**data, seconds=60).measure(StepContext(slow, 9, final=True))
    assert slow.last_began <= 60  # the pass under way is the last, however many points it holds
    assert 8 <= values["points/train"] < 200


def test_a_slow_model_is_searched_quickly_at_the_end(monkeypatch):
    model, data = many()
    slow = Timed(model, monkeypatch)
    slow.per_pass = 0.2
    for started, n in ((False, 8), (True, 64)):  # as many as there was time for at the start
        probe, ctx = MarginGap(**data, seconds=60), StepContext(slow, 9, final=True)
        if started:
            probe.measure(StepContext(slow, 0))
        began = slow.now
        values = probe.measure(ctx)
        assert slow.now - began <= 60.4
        assert values["points/train"] >= n
    assert "quick search without evidence, for want of time" in ctx.messages[0]
    assert Margins.from_dict(ctx.artifacts["margins-inf-test"]).evidence is None


def test_a_model_too_slow_for_any_point_is_named(monkeypatch):
    model, data = many()
    slow = Timed(model, monkeypatch)
    slow.per_pass = 20.0
    for ctx in (StepContext(slow, 0), StepContext(slow, 9, final=True)):
        assert MarginGap(**data, seconds=60).measure(ctx) == {}
        assert "none, since 8 points of each part take longer than 60 s" in ctx.messages[0]
        assert not ctx.artifacts


def test_fewer_points_at_the_start_stay_fewer(monkeypatch):
    model, data = many()
    slow = Timed(model, monkeypatch)
    slow.per_point = 0.01
    probe, ctx = MarginGap(**data, seconds=20), StepContext(slow, 0)
    n = probe.measure(ctx)["points/train"]
    assert 8 <= n < 64
    assert "fewer points than 64" in ctx.messages[0]
    assert probe.measure(StepContext(slow, 5))["points/train"] == n


@pytest.mark.slow
def test_the_end_is_announced(capsys):
    model, data, _ = linear()
    MarginGap(**data, final_points=35, seconds=60).measure(StepContext(model, 9, final=True))
    line = "excite: measuring margins at the end: 35 training and 30 test points, at most 60 s\n"
    assert capsys.readouterr().err == line


def test_the_state_holds_the_perturbations_and_the_cost():
    model, data, _ = linear()
    probe = MarginGap(**data)
    probe.measure(StepContext(model, 0))
    probe.schedule.cost = 0.25
    again = MarginGap(**data)
    again.load_state_dict(probe.state_dict())
    assert torch.equal(again.state_dict()["found"]["train"], probe.state_dict()["found"]["train"])
    assert again.schedule.cost == 0.25
    assert again.measure(StepContext(model, 7)) == probe.measure(StepContext(model, 7))


def test_a_model_that_has_diverged_has_no_margins():
    model, data, _ = linear()
    probe = MarginGap(**data)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    ctx = StepContext(model, 9, final=True)
    assert probe.measure(StepContext(model, 5)) == {}
    assert probe.measure(ctx) == {}
    assert "NaN" in ctx.messages[0]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({}, "got neither"),
        ({"train": torch.zeros(3, 3)}, "two tensors"),
        ({"train": (torch.zeros(3, 3), torch.zeros(2))}, "one label each"),
        ({"train": (torch.zeros(0, 3), torch.zeros(0))}, "one label each"),
        ({"test": (torch.zeros(3, 3), torch.zeros(3)), "norm": "1"}, "norm"),
        ({"test": (torch.zeros(3, 3), torch.zeros(3)), "steps": 5}, "unknown option"),
    ],
)
def test_bad_arguments_are_refused(data, match):
    with pytest.raises(InputError, match=match):
        MarginGap(**data)


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4), "token ids have no margin"),
        (torch.zeros(4, 3), torch.tensor([0.2, 1.5, 3.0, 0.0]), "regression targets have no margin"),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 1]), "labels 0 or 1"),
    ],
)
def test_data_that_do_not_suit_the_model_are_refused_on_attach(x, y, match):
    with pytest.raises(InputError, match=match):
        MarginGap((x, y)).attach(StepContext(nn.Linear(3, 1), 0))


def series(**values):
    class History(dict):
        def __missing__(self, name):
            return np.array([], int), np.array([])

    return History({f"margin_gap/{k.replace('_', '/')}": (np.array([0, 9]), np.array(v)) for k, v in values.items()})


def test_a_sentence_is_only_said_where_the_gap_exceeds_chance():
    medians = {"median_train": [0, 0.3], "median_test": [0, 0.1]}
    (said,) = MarginGap.findings(series(gap=[0.0, 0.3], chance=[0.24, 0.086], **medians))
    assert said.kind == "warning"
    assert "Training margins are larger" in said.text
    assert MarginGap.findings(series(gap=[0.0, 0.2], chance=[0.24, 0.24], **medians)) == []
    (said,) = MarginGap.findings(series(gap=[0.0, 0.05], chance=[0.24, 0.086], **medians))
    assert said.kind == "good"
    wrong = {"median_train": [0, 0.0], "median_test": [0, 0.0]}  # most points are misclassified: no good news
    assert MarginGap.findings(series(gap=[0.0, 0.05], chance=[0.24, 0.086], **wrong)) == []
    assert Loss.findings(series()) == []


def test_a_paid_schedule_measures_what_is_paid_for():
    schedule = PaidSchedule(0.1)
    assert schedule.due(0)
    schedule.next = schedule.plan(0, 0, 2.0, 0.0, 0.0)  # the start tells the cost, and does not count
    steps, trained, measured = 0, 0.0, []
    for step in range(1, 1011):
        steps, trained = steps + 1, trained + 0.1
        if schedule.due(step):
            schedule.next = schedule.postpone(step, steps, trained)
            if schedule.due(step):
                measured.append(step)
                schedule.next = schedule.plan(step, steps, 2.0, 0.0, trained)
    assert measured == pytest.approx(
        [100, 400, 600, 800, 1000], abs=2
    )  # half of the first cost is expected of the second
    assert schedule.spent <= 0.1 * trained + 2.0


def test_what_a_slow_start_left_is_not_spent_at_once():
    schedule = PaidSchedule(0.03, advance=1.8)
    schedule.next = schedule.plan(0, 0, 1.0, 0.0, 0.0)  # the first measurement is slow: caches, imports
    measured = []
    for step in range(1, 201):
        if schedule.due(step):
            schedule.next = schedule.postpone(step, step, 0.01 * step)
            if schedule.due(step):
                measured.append(step)
                schedule.next = schedule.plan(step, step, 0.05, 0.0, 0.01 * step)
    assert len(measured) > 10
    assert measured[0] < 40
    assert min(b - a for a, b in pairwise(measured)) > 1


def test_an_advance_pays_for_short_trainings():
    schedule = PaidSchedule(0.03, advance=1.8)
    schedule.next = schedule.plan(0, 0, 0.4, 0.0, 0.0)
    trained, measured = 0.0, []
    for step in range(1, 60_001):
        trained += 0.01
        if schedule.due(step):
            schedule.next = schedule.postpone(step, step, trained)
            if schedule.due(step):
                measured.append(trained)
                schedule.next = schedule.plan(step, step, 0.2, 0.0, trained)
                assert schedule.spent <= 0.03 * trained + 1.8 * trained / (trained + 0.5) + 1e-9
    early = [at for at in measured if at <= 6]
    assert len([at for at in early if at <= 0.5]) == 4  # of 0.03 · 0.5 + 1.8 · 0.5 / 1 = 0.915 seconds
    assert len(early) == 9  # 0.03 · 6 + 1.8 · 6 / 6.5 = 1.84 seconds
    assert max(b - a for a, b in pairwise(early)) < 3
    assert len(measured) == pytest.approx((0.03 * 600 + 1.8) / 0.2, abs=2)
