"""The first line, for runs whose story is known; it errs no more often than it says."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from excite.margin import Margins
from excite.probes.findings import Finding
from excite.report.verdict import RunOutcome, headline
from excite.report.verdict.outcome import Median, from_latest, from_margins, hardly

from .planted import both, sample

METRICS = {
    "margin_gap/median/train": 0.05, "margin_gap/median/test": 0.05, "margin_gap/low/train": 0.02, "margin_gap/low/test": 0.02,
    "margin_gap/gap": 0.05, "margin_gap/chance": 0.1, "margin_gap/accuracy/test": 0.9,
}  # fmt: skip


def line(margins, **more):
    return headline([from_margins(margins, measurable=True, **more)], name="runs/a")


def test_a_robust_network_whose_training_tells_the_truth():
    found = line(both(0.05, 0.05))
    assert found.kind == "good"
    assert found.text.startswith(
        "Robust: a change of 12/255 per pixel is enough to change half of the decisions on test data"
    )
    assert "training tells the truth about test (gap 0.0" in found.text
    assert "by chance up to 0.09" in found.text
    assert found.text.endswith("Measured on 500 training and 500 test points; the search was verified.")
    assert found.action == "Try another norm: excite margins runs/a --norm 2."
    assert found.link == "#chart-margins"


def test_a_network_that_is_not_robust():
    found = line(both(0.004, 0.004))
    assert found.kind == "bad"
    assert found.text.startswith("Not robust: a change of 0.97/255 per pixel")
    assert "excitation or adversarial training" in found.action
    somewhat = line(both(0.015, 0.015))
    assert somewhat.kind == "note"
    assert somewhat.text.startswith("Somewhat robust: a change of 4/255")


def test_a_gap_is_stated_with_direction_and_what_chance_gives():
    over = line(both(0.06, 0.04))
    assert over.kind == "warning"
    assert "training overstates it: " in over.text
    assert "of test decisions change within" in over.text
    assert "test margins" in over.action
    assert "training understates it" in line(both(0.04, 0.06)).text


def test_the_direction_is_that_of_the_curves_not_of_the_medians():
    rng = np.random.default_rng(0)
    narrow, wide = sample(rng, 0.05, wrong=0.0), sample(rng, 0.05, wrong=0.0)
    wide.values[:200] /= 10
    narrow.values[:250] *= 0.99
    found = line({"train": narrow, "test": wide})
    assert "overstates" in found.text


def test_margins_that_were_not_measured():
    worst = Finding("warning", "The loss has risen.", panel="losses")
    stored = headline([RunOutcome(measurable=True)], worst, "runs/a")
    assert stored.kind == "warning"
    assert stored.text == "Robustness was not measured. Most important otherwise: The loss has risen."
    assert stored.action == "Measure it: excite margins runs/a."
    assert stored.link == "#panel-losses"
    many = Finding(
        "warning", f"The inputs of 26 layers lost rank: {'layer.1 from 15 to 1; ' * 9}and more.", panel="ranks"
    )
    text = headline([RunOutcome()], many).text
    assert text == "Robustness was not measured. Most important otherwise: The inputs of 26 layers lost rank."
    bare = headline([RunOutcome()])
    assert bare.kind == "note"
    assert "train=(x, y) and test=(x, y) to excite.watch" in bare.action
    assert "while the network trains" in headline([RunOutcome(status="running")]).action
    assert headline([RunOutcome(status="failed", reason="no memory")]).text.startswith("The run failed: no memory.")


def test_a_diverged_run_says_so_first():
    found = headline(
        [
            RunOutcome(
                status="diverged",
                reason="the loss is not a finite number since step 901",
                medians={"test": Median(1.0)},
            )
        ]
    )
    assert found.kind == "diverged"
    assert found.text.startswith("Diverged: the loss is not a finite number since step 901.")
    assert found.link == "#panel-losses"
    assert "learning rate" in found.action


def test_margins_that_are_not_to_be_trusted():
    found = line(both(0.05, 0.05, flat=300))
    assert found.kind == "warning"
    assert not found.text.startswith("Robust")
    assert "perhaps much less" in found.text
    assert "at 300 of 500 points the gradient is exactly zero" in found.text
    assert "--steps 500" in found.action
    unchecked = line(both(0.05, 0.05, checked=False))
    assert unchecked.text.endswith("the search was not verified.")
    assert unchecked.action.startswith("Verify the search")


def test_few_points_ask_for_more():
    found = line(both(0.05, 0.05, n=40))
    assert found.kind == "warning"
    assert "too few points to tell whether training agrees with test" in found.text
    assert "40 training and 40 test points" in found.text
    assert found.action == "Measure more points: excite margins runs/a --points 500."


def test_one_part_alone_and_a_fixed_batch():
    only = headline([from_margins({"test": both(0.05, 0.05)["test"]})])
    assert "training and test data were not both measured" in only.text
    assert only.action.startswith("Measure both")
    batch = headline([from_latest({"margin/median": 0.05})])
    assert "a fixed batch of training data" in batch.text


@pytest.mark.parametrize(
    ("classes", "accuracy", "learned"),
    [(2, 0.55, False), (2, 0.7, True), (10, 0.25, False), (10, 0.55, True), (None, 0.55, True)],
)
def test_accuracy_is_judged_by_the_number_of_classes(classes, accuracy, learned):
    found = line(both(0.05, 0.05, wrong=0.4), accuracy={"test": accuracy}, classes=classes)
    assert ("Hardly better than chance" in found.text) != learned
    assert hardly(2) == 0.6
    assert hardly(10) == pytest.approx(0.28)


def test_most_points_misclassified_or_never_reached():
    wrong = line(both(0.05, 0.05, wrong=0.6))
    assert wrong.kind == "bad"
    assert wrong.text.startswith("Not accurate: 60% of the test data is misclassified")
    margins = both(0.05, 0.05)
    for one in margins.values():
        one.values[:400] = np.inf
    silent = line(margins)
    assert silent.kind == "warning"
    assert "failure of the search" in silent.text
    assert "--steps 500" in silent.action


def test_a_run_in_progress():
    found = headline([from_latest(METRICS, step=1200, status="running")])
    assert found.text.startswith("So far, at step 1,200: a change of 0.05 per input value is enough")
    assert "gap 0.05, by chance up to 0.10" in found.text
    assert "369 training" in found.text  # from the chance level
    assert found.link == "#margin-history"
    ended = headline([from_latest(METRICS, step=7, status="stopped")])
    assert ended.text.startswith("In the last measurement, at step 7: a change of")
    assert found.action.startswith("Wait for the end")
    wide = headline([from_latest(METRICS | {"margin_gap/gap": 0.3, "margin_gap/median/test": 0.02})])
    assert "training overstates it, 0.05 on training data" in wide.text


def test_units_that_are_not_pixels():
    some = SimpleNamespace(low=-1.0, high=2.0, pixels=False)
    found = line(both(0.12, 0.12, unit=some)).text
    assert "a change of 0.11 per input value (4 % of their range) is enough" in found
    assert line(both(0.12, 0.12, unit=None)).text.startswith("A change of 0.11 per input value is enough")


def test_runs_of_which_none_is_accurate_are_not_compared():
    wrong = [
        from_margins({"test": Margins(torch.tensor([0.0] * k + [0.1] * (9 - k)), "inf")}, label=f"run{k}")
        for k in (6, 5)
    ]
    found = headline(wrong)
    assert found.kind == "bad"
    assert found.text == (
        "Not accurate: each of 2 runs misclassifies half of the test data or more, so that the median margins are 0; the most accurate is "
        "run5, 44%."
    )
    assert "Train longer" in found.action
    assert "2 of 3 runs" in headline([*wrong, RunOutcome("silent")]).text


def test_several_runs_are_ranked_and_those_that_diverged_named():
    outcomes = [from_margins(both(m, m, seed), label=name) for name, m, seed in (("a", 0.03, 1), ("b", 0.06, 2))]
    lost = RunOutcome("c", "diverged", "the loss rose from 2 to 200")
    found = headline([*outcomes, lost])
    assert found.text.startswith("Most robust of 3: b, where a change of")
    assert "; then a (" in found.text
    assert "Diverged: c." in found.text
    assert headline([lost, lost]).kind == "diverged"
    assert headline([RunOutcome("a"), RunOutcome("b")]).text == "Robustness was not measured in these 2 runs."
    alike = [from_margins(both(0.05, 0.05, seed), label=name) for name, seed in (("a", 1), ("b", 2))]
    assert headline(alike).text.startswith("Undecided which of 2 is most robust: ")
    assert headline(alike).action.startswith("Measure more points, 500 points of each part, or train more seeds")
    assert found.action == "Continue with b, and verify it in another norm: excite.margins with norm='2'."
    stored = [replace(outcome, measurable=True) for outcome in outcomes]
    assert headline(stored).action.endswith("in another norm: excite margins RUN --norm 2.")


def test_runs_of_one_distribution_show_a_gap_as_rarely_as_stated():
    """At the 5 % level: of 400 pairs, 20 are expected and 35 exceeded once in 1000 times; ties make it rarer."""
    rng = np.random.default_rng(0)
    for n in (40, 500):
        pairs = [{part: sample(rng, 0.05, n=n) for part in ("train", "test")} for _ in range(400)]
        wrong = sum("states it" in headline([from_margins(pair)]).text for pair in pairs)
        assert wrong <= 35
