"""Margins of training and test points: closed forms, the gap against chance, time limits and bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from excite import InputError
from excite.margin import Margins
from excite.probes import Loss, MarginGap, PaidSchedule
from excite.probes.base import StepContext


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


def test_the_end_is_measured_with_evidence_and_stored():
    model, data, _ = linear()
    probe, ctx = MarginGap(**data), StepContext(model, 9, final=True)
    probe.measure(ctx)
    stored = Margins.from_dict(ctx.artifacts["margins-inf-test"])
    assert len(stored) == 30
    assert stored.evidence is not None
    assert ctx.artifacts["summary"]["accuracy"]["train"] == pytest.approx(37 / 40)
    assert [line.split(":")[0] for line in ctx.messages] == ["margins at the end"]
    assert "by chance up to" in ctx.messages[0]


def test_slow_models_are_measured_on_fewer_points():
    model, data, _ = linear()
    probe = MarginGap(**data, seconds=0)
    ctx = StepContext(model, 0)
    values = probe.measure(ctx)
    assert (values["points/train"], values["points/test"]) == (8, 8)  # the few that are timed
    assert "fewer points than 64" in ctx.messages[0]
    assert probe.measure(StepContext(model, 5))["points/train"] == 8


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
    assert measured == pytest.approx([200, 400, 600, 800, 1000], abs=2)
    assert schedule.spent <= 0.1 * trained + 2.0
