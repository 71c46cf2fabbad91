"""What a node reports: its versions, and whether it sees the workspace."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from excite._version import __version__
from excite.jobs.node_report import NodeReport, report_node
from excite.jobs.nodes import marker_for
from excite.jobs.workspace import find_workspace
from jobs.sleep_jobs import SleepJob


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_marker_is_seen_where_it_was_created(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr("excite.jobs.node_report.time.sleep", lambda _: None)
    workspace = find_workspace(tmp_path / "out" if kind == "folder" else f"file://{tmp_path}/out")
    marker = marker_for(workspace.bind([SleepJob("fine", 0, workspace.folder / "fine-0")])[0])
    assert not report_node(marker).sees_workspace
    marker.create()
    assert report_node(marker) == NodeReport(platform.python_version(), __version__, True)
    marker.remove()
    assert not report_node(marker).sees_workspace
    assert list((tmp_path / "out").iterdir()) == []
