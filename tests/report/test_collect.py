"""What a report reads from run folders."""

import json

import pytest
import torch

from excite import ExciteError, RunError
from excite.margin import Margins
from excite.report import make_report
from excite.report.collect import collect
from excite.report.page import table
from excite.runs import Run


def test_runs_are_grouped_into_arms(runs):
    arms = collect([runs])
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("plain", 3), ("excited", 3)]
    assert [row["accuracy test"] for row in table(arms)] == ["97.0% (97.0% to 97.0%)"] * 2
    assert collect([runs / "a0"])[0].runs[0].by_layer("rank/share").keys() == {"0"}


def test_margins_in_different_norms_are_not_compared(runs):
    with Run.open(runs / "a0", "a") as run:
        run.write_json("margins-2-train", Margins(torch.ones(5), "2").to_dict())
    assert all(m.norm == "inf" for arm in collect([runs]) for one in arm.runs for m in one.margins.values())


def test_bad_folders_are_refused(tmp_path, runs):
    with pytest.raises(RunError, match="no run folder"):
        make_report([tmp_path / "nothing"]).write(tmp_path / "r.html")
    with pytest.raises(ExciteError, match="at least one run"):
        make_report([]).write(tmp_path / "r.html")
    (runs / "a0/artifacts/margins-inf-test.json").write_text(json.dumps({"values": [1]}))
    with pytest.raises(RunError, match="does not hold margins"):
        make_report([runs]).write(tmp_path / "r.html")
    (runs / "a0/artifacts/margins-inf-test.json").write_text("{broken")
    with pytest.raises(RunError):
        make_report([runs]).write(tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        make_report([runs / "b0"]).write(tmp_path / "file/r.html")
    assert not (tmp_path / "r.html").exists()
