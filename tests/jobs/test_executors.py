"""Names of executors."""

from __future__ import annotations

import pytest

import excite.jobs.executors
from excite.errors import InputError
from excite.jobs.executors import ProcessExecutor, find_executor
from excite.jobs.ray import RayExecutor


def test_executors_by_name() -> None:
    assert find_executor(None) is None
    assert find_executor("local", workers=3, gpus=0.5, retries=2) == ProcessExecutor(3, 2, 0.5)
    assert find_executor("ray", workers=3) == RayExecutor(None, 3)
    assert find_executor("ray:10.0.0.5:6379", gpus=1.0) == RayExecutor("10.0.0.5:6379", gpus=1.0)


@pytest.mark.parametrize("on", ["slurm", "local:4", ""])
def test_unknown_executors_are_refused(on: str) -> None:
    with pytest.raises(InputError, match="expected 'local', 'ray' or 'ray:ADDRESS'"):
        find_executor(on)


def test_gpus_need_an_executor() -> None:
    with pytest.raises(InputError, match="gpus-per-job needs worker processes"):
        find_executor(None, gpus=1.0)


def test_earlier_names_still_work() -> None:
    with pytest.warns(DeprecationWarning, match="find_engine is deprecated: use excite.jobs.executors.find_executor"):
        assert excite.jobs.executors.find_engine is find_executor
    with pytest.warns(DeprecationWarning, match="ProcessExecutor"):
        assert excite.jobs.executors.Workers is ProcessExecutor
