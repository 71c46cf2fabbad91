"""What a run stores about versions and the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from excite.runs import Run

CONFIG = {"epochs": 3, "data": {"name": "digits"}}


@pytest.fixture
def run(tmp_path: Path):
    with Run.create(tmp_path / "run", CONFIG) as run:
        yield run


def test_the_environment_names_no_host_user_or_path(run: Run) -> None:
    import platform

    text = (run.path / "environment.json").read_text()
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert os.getcwd() not in text
