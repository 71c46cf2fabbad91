"""Reports of nodes and the checks of a cluster, without a cluster."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from excite._version import __version__
from excite.errors import InputError
from excite.jobs import local as workers
from excite.jobs.executors import find_executor
from excite.jobs.local import assign_gpus
from excite.jobs.node_report import NodeReport, report_node
from excite.jobs.nodes import check_gpus, check_reports, marker_for
from excite.jobs.workspace import find_workspace
from jobs.sleep_jobs import SleepJob

FINE = NodeReport(platform.python_version(), __version__, True)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            NodeReport("3.1.4", __version__, True),
            r"node b has Python 3\.1\.4 and Excite .*, this machine .*: install the same",
        ),
        (NodeReport(FINE.python, "0.0.1", True), r"node b has Python .* and Excite 0\.0\.1, this machine"),
        (NodeReport(FINE.python, __version__, False), r"node b does not see /somewhere: choose a folder on a shared"),
    ],
)
def test_a_node_that_differs_or_sees_no_workspace_is_refused(report: NodeReport, words: str) -> None:
    check_reports({"a": FINE, "b": FINE}, "/somewhere")
    with pytest.raises(InputError, match=words):
        check_reports({"a": FINE, "b": report}, "/somewhere")


def test_more_gpus_than_any_node_has_are_refused() -> None:
    check_gpus(0.0, {})
    check_gpus(2.0, {"a": 2.0, "b": 1.0})
    with pytest.raises(InputError, match="gpus-per-job 3: no node of the cluster has more than 2 GPUs"):
        check_gpus(3.0, {"a": 2.0, "b": 2.0})  # four in all, but not on one node
    with pytest.raises(InputError, match="has more than 1 GPU; request fewer"):
        check_gpus(2.0, {"a": 1.0})


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_marker_is_seen_where_it_was_created(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr("excite.jobs.node_report.time.sleep", lambda _: None)
    workspace = find_workspace(tmp_path / "out" if kind == "folder" else f"file://{tmp_path}/out")
    marker = marker_for(workspace.bind([SleepJob("fine", 0, workspace.folder / "fine-0")])[0])
    assert not report_node(marker).sees_workspace
    marker.create()
    assert report_node(marker) == FINE
    marker.remove()
    assert not report_node(marker).sees_workspace
    assert list((tmp_path / "out").iterdir()) == []


def test_gpus_of_worker_processes() -> None:
    assert assign_gpus(3, 0.0, []) == [None, None, None]
    assert assign_gpus(8, 1.0, ["0", "1"]) == ["0", "1"]
    assert assign_gpus(8, 2.0, ["0", "1", "2", "3", "4"]) == ["0,1", "2,3"]
    assert assign_gpus(8, 1.5, ["0", "1", "2"]) == ["0,1"]
    assert assign_gpus(8, 0.5, ["0", "1"]) == ["0", "1", "0", "1"]
    assert assign_gpus(3, 0.3, ["0"]) == ["0", "0", "0"]
    with pytest.raises(InputError, match="gpus-per-job 2: this machine has 1 GPU; request fewer"):
        assign_gpus(1, 2.0, ["0"])
    with pytest.raises(InputError, match="gpus-per-job 3: this machine has 2 GPUs; request fewer"):
        assign_gpus(1, 3.0, ["0", "1"])
    with pytest.raises(InputError, match=r"gpus-per-job 0\.5: this machine has 0 GPUs; leave it out"):
        assign_gpus(1, 0.5, [])
    with pytest.raises(InputError, match="gpus-per-job needs worker processes"):
        find_executor(None, gpus=1.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ["0", "1"]), ("2, 3", ["2", "3"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])],
)
def test_worker_processes_share_the_gpus_that_this_one_was_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: list[str]
) -> None:
    """Numbers of devices are those of the machine: with CUDA_VISIBLE_DEVICES=2,3 the first of ours is 2, not 0."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert workers._visible_gpus() == expected
