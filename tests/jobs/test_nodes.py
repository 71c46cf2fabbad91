"""Reports of nodes and the checks of a cluster, without a cluster."""

from __future__ import annotations

import platform

import pytest

from excite._version import __version__
from excite.errors import InputError
from excite.jobs.node_report import NodeReport
from excite.jobs.nodes import check_gpus, check_reports

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
