"""Order of runs: by margin where accuracy is comparable, undecided within noise."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from excite.margin import Margins
from excite.report.verdict import RunOutcome, rank
from excite.report.verdict.outcome import from_latest, from_margins

from .planted import both, sample


def run(name, median, seed=0, **options):
    accuracy = options.pop("accuracy", None)
    return from_margins(both(median, median, seed, **options), accuracy and {"test": accuracy}, label=name)


def test_the_largest_margin_comes_first():
    found = rank([run("a", 0.02, 1), run("b", 0.06, 2), run("c", 0.04, 3)])
    assert [(row.outcome.label, row.rank) for row in found] == [("b", 1), ("c", 2), ("a", 3)]
    assert found[1].text == "smaller margin than b"


def test_runs_within_noise_share_a_place():
    found = rank([run("a", 0.05, 1), run("b", 0.0505, 2), run("c", 0.02, 3)])
    assert [row.rank for row in found] == [1, 1, 3]
    assert "undecided: within noise of" in found[1].text


def test_less_accurate_runs_are_not_ranked():
    found = rank(
        [
            run("robust", 0.06, 1, accuracy=0.74),
            run("accurate", 0.02, 2, accuracy=0.92),
            run("close", 0.04, 3, accuracy=0.91),
        ]
    )
    assert [(row.outcome.label, row.rank) for row in found] == [("close", 1), ("accurate", 2), ("robust", None)]
    assert found[2].text == "not comparable: 18 points less accurate than accurate"


def test_runs_that_diverged_or_have_no_margins_come_last():
    lost = RunOutcome("lost", "diverged", "the loss is not a finite number")
    found = rank([lost, RunOutcome("silent"), run("a", 0.05)])
    assert [(row.outcome.label, row.rank) for row in found] == [("a", 1), ("silent", None), ("lost", None)]
    rows = [row.to_dict() for row in found]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows[0]["margin_text"].endswith("/255 per pixel")
    assert rows[2]["status"] == "diverged"


def inaccurate(name, wrong):
    values = torch.tensor([0.0] * wrong + [0.1] * (9 - wrong))
    return from_margins({"test": Margins(values, "inf")}, label=name)


def test_runs_that_misclassify_most_points_have_no_place():
    found = rank([inaccurate("x", 6), run("a", 0.05), inaccurate("y", 5)])
    assert [(row.outcome.label, row.rank) for row in found] == [("a", 1), ("y", None), ("x", None)]
    assert found[1].text == "not accurate: most of the test data is misclassified"


def test_what_a_diverged_run_measured_before_is_not_shown():
    lost = replace(run("lost", 0.05), status="diverged", reason="the loss is not a finite number")
    row = rank([lost])[0].to_dict()
    assert (row["margin"], row["margin_text"], row["accuracy"], row["gap"]) == (None, "", None, None)


def test_seeds_count_as_noise():
    rng = np.random.default_rng(0)

    def variant(name, medians):
        return from_margins({"test": [sample(rng, m) for m in medians]}, label=name)

    spread = rank([variant("a", [0.03, 0.05, 0.07]), variant("b", [0.04, 0.06, 0.08])])
    assert [row.rank for row in spread] == [1, 1]
    steady = rank([variant("a", [0.049, 0.05, 0.051]), variant("b", [0.079, 0.08, 0.081])])
    assert [row.rank for row in steady] == [1, 2]


def test_medians_in_progress_have_an_interval_of_quantiles():
    def outcome(name, median):
        values = {"median/test": median, "low/test": median / 2, "chance": 0.12, "gap": 0.0}
        return from_latest({f"margin_gap/{key}": value for key, value in values.items()}, label=name)

    assert [row.rank for row in rank([outcome("a", 0.05), outcome("b", 0.051)])] == [1, 1]
    assert [row.rank for row in rank([outcome("a", 0.05), outcome("b", 0.08)])] == [1, 2]


@pytest.mark.parametrize("count", [2, 6])
def test_equal_runs_are_told_apart_no_more_often_than_stated(count):
    """At the 5 % level over all pairs: of 200 comparisons 10 are expected and more than 22 happen once in 1000 times."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        outcomes = [from_margins({"test": sample(rng, 0.05, n=200)}, {"test": 0.9}, label=str(i)) for i in range(count)]
        wrong += {row.rank for row in rank(outcomes)} != {1}
    assert wrong <= 22
