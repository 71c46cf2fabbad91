"""Verdict on runs whose margins are made up."""

from types import SimpleNamespace

import numpy as np
import pytest

from excite.report import make_report
from excite.report.collect import collect
from excite.report.verdict import compare, verdict
from excite.runs import Run

from ..conftest import make_run


def test_a_real_difference_is_found_with_its_sign(runs):
    plain, excited = collect([runs])
    found = compare(excited, plain)
    assert found.decided
    assert found.high < 0
    assert found.difference == pytest.approx(excited.gap() - plain.gap())
    assert "the gap is smaller" in str(found)
    assert "the gap is larger" in str(compare(plain, excited))
    assert verdict([plain, excited])[0].startswith("Gap between training and test margins, smallest first: excited")


def made_up(shift, rng, runs=5, n=178):
    """An arm whose test margins are moved by about `shift` standard deviations, a little differently in every run."""
    moved = 1 - 0.2 * (shift + 0.075 * rng.normal(size=runs))
    pairs = [(rng.normal(1, 0.2, n), rng.normal(m, 0.2, n)) for m in moved]
    return SimpleNamespace(name="made up", pairs=lambda: dict(enumerate(pairs)))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.25, 0.5])
def test_equal_gaps_are_told_apart_in_one_case_of_twenty(shift):
    rng = np.random.default_rng(0)
    decided = sum(compare(made_up(shift, rng), made_up(shift, rng), 150).decided for _ in range(120))
    assert decided <= 13  # 5 % are 6 of 120; more than 13 would happen once in 200 times


@pytest.mark.slow
def test_different_gaps_are_told_apart():
    rng = np.random.default_rng(0)
    decided = sum(compare(made_up(0.0, rng), made_up(0.4, rng), 150).high < 0 for _ in range(60))
    assert decided >= 50


def test_runs_are_paired_by_their_seed(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", "a", 0.1, seed)
    for seed in (2, 1):
        make_run(tmp_path / f"b{seed}", "b", 0.1, seed)
    found = compare(*collect([tmp_path]))
    assert found.runs == 2
    assert found.difference == 0


def test_doubts_are_said(tmp_path):
    make_run(tmp_path / "one", "one", 0.1, status="failed")
    text = " ".join(verdict(collect([tmp_path / "one"])))
    assert "without evidence that the search converged" in text
    assert "failed: because" in text
    with Run.create(tmp_path / "bare", {}) as run:
        run.log(0, {"loss/step": 1.0})
    assert "No margins are stored" in verdict(collect([tmp_path / "bare"]))[0]
    page = make_report([tmp_path / "bare"]).write(tmp_path / "bare.html").read_text()
    assert "Loss" in page
    assert 'id="summary"' not in page, "a table of dashes says nothing"
