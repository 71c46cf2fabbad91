"""Outcomes of run folders, with one run or several of a variant."""

import pytest

from excite.report import make_report
from excite.report.collect import collect
from excite.report.verdict import headline, rank
from excite.report.verdict.runs import classes, has_checkpoint, outcome_of, overviews
from excite.runs import Run

from ..conftest import make_run


def outcome(*paths):
    variants = collect(paths)
    return [outcome_of(variant, overviews(variants)) for variant in variants]


def test_stored_margins_of_all_runs_of_a_variant(runs):
    plain, excited = outcome(runs)
    assert plain.points == {"train": 200, "test": 200}
    assert plain.gap.low > 0
    assert plain.medians["train"].value > plain.medians["test"].value
    assert plain.accuracy == pytest.approx({"train": 1.0, "test": 0.97})
    assert excited.gap.low == 0
    assert plain.final
    assert plain.verified is None
    assert plain.step == 19
    assert not plain.measurable


def test_a_run_that_diverged_does_not_count_among_others(tmp_path):
    make_run(tmp_path / "a", "one", 0.0)
    with Run.create(tmp_path / "b", {}) as run:
        for step in range(30):
            run.log(step, {"loss/step": 1.0 if step < 9 else float("nan")})
        run.write_json("summary", {"arm": "one"})
    (both,) = outcome(tmp_path)
    assert both.status == "done"
    (lost,) = outcome(tmp_path / "b")
    assert (lost.status, lost.reason) == ("diverged", "the loss is not a finite number since step 9")


def test_gaps_of_runs_that_diverged_are_not_compared(tmp_path):
    for name, shift in (("a", 0.0), ("b", 0.3), ("lost", 0.1)):
        make_run(tmp_path / name, name, shift)
    with Run.open(tmp_path / "lost", "a") as run:
        for step in range(20, 60):
            run.log(step, {"loss/step": 1e3})
    sentences = make_report([tmp_path]).sentences
    assert [sentence for sentence in sentences if "lost" in sentence] == [
        "lost: the run lost diverged, so that its margins do not count: the loss rose from 0.0955 to 1e+03."
    ]
    assert any("b against a" in sentence for sentence in sentences)
    assert make_report([tmp_path / "lost"]).sentences == (sentences[-1],)


def test_margins_in_progress(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        run.log(
            7,
            {
                "margin_gap/median/test": 0.2,
                "margin_gap/gap": 0.3,
                "margin_gap/chance": 0.1,
                "margin_gap/accuracy/test": 0.8,
            },
        )
    (found,) = outcome(tmp_path / "run")
    assert (found.margin, found.gap.low, found.accuracy, found.final) == (0.2, pytest.approx(0.2), {"test": 0.8}, False)


@pytest.mark.parametrize(("out", "count"), [("10", 10), ("1", 2), ("3×2×2", None), ("", None), ("1000000", None)])
def test_classes_are_the_outputs_of_the_last_layer(out, count):
    assert classes({"layers": [{"out": "7"}, {"out": out}]}) == count
    assert classes(None) is None
    assert classes({"layers": []}) is None


def test_checkpoints(tmp_path):
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.temporary").touch()
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints/5.safetensors").touch()
    assert has_checkpoint(tmp_path)


def test_weights_that_a_watch_stored_can_be_measured(tmp_path):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts/model.safetensors").touch()
    assert has_checkpoint(tmp_path)


def test_a_percentage_is_left_out_with_a_sentence(tmp_path):
    make_run(tmp_path / "a", "a", 0.0)
    with Run.open(tmp_path / "a", "a") as run:
        run.write_json("summary", {"arm": "a", "accuracy": {"train": 0.99, "test": 93.2}})
    (found,) = outcome(tmp_path / "a")
    assert found.accuracy["train"] == 0.99
    assert 0 <= found.accuracy["test"] <= 1  # the fraction of points with a margin above 0
    assert found.note == "An accuracy of 93.2 is not a fraction between 0 and 1 and is left out: log 0.932 for 93.2 %."
    assert headline([found, found]).text.count(found.note) == 1
    with Run.create(tmp_path / "b", {}) as run:
        run.log(7, {"margin_gap/median/test": 0.2, "margin_gap/chance": 0.1, "margin_gap/accuracy/test": -3.0})
    (other,) = outcome(tmp_path / "b")
    assert (other.accuracy, other.note) == ({}, "An accuracy of -3 is not a fraction between 0 and 1 and is left out.")
    assert [one.rank for one in rank([found, other])]


def test_margins_in_progress_are_in_the_unit_of_the_data(tmp_path):
    unit = {"low": 0, "high": 1, "pixels": True}
    for name, known in (("a", unit), ("b", {"low": "x"}), ("c", None)):
        with Run.create(tmp_path / name, {"watch": {"margins": {"unit": known}}}) as run:
            run.log(7, {"margin_gap/median/test": 10 / 255, "margin_gap/chance": 0.1})
    found = [headline(outcome(tmp_path / name)).text for name in "abc"]
    assert "a change of 10/255 per pixel is enough" in found[0]
    assert "a change of 0.039 per input value is enough" in found[1]
    assert found[1] == found[2]


def test_token_ids_are_not_asked_to_be_measured(tmp_path):
    for name, config in (("tokens", {"watch": {"inputs": "integers"}}), ("other", {"watch": "x"})):
        with Run.create(tmp_path / name, config) as run:
            run.log(1, {"loss/step": 1.0})
    tokens, other = (headline(outcome(tmp_path / name)) for name in ("tokens", "other"))
    assert "whole numbers such as token ids" in tokens.text
    assert "train=(x, y)" not in tokens.action
    assert "train=(x, y)" in other.action
