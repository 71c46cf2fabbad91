"""Diagnosis of an installation: versions, devices, extras, datasets, problems."""

from __future__ import annotations

import importlib.metadata as metadata
import platform
from typing import Any

import numpy
import pytest
import torch

from excite import __version__
from excite.cli import diagnosis
from excite.data.sources import SOURCES


def installed() -> bool:
    try:
        metadata.version("excite")
    except metadata.PackageNotFoundError:
        return False
    return True


needs_package = pytest.mark.skipif(
    not installed(), reason="run from the source tree: excite is not installed as a package"
)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No data, and no driver without a GPU, whatever this machine has."""
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: None)


@needs_package
def test_versions_devices_extras_and_data_are_printed(excite: Any) -> None:
    problems = diagnosis.diagnose().problems
    status, out, _ = excite("doctor")
    assert status == (1 if problems else 0)
    facts = dict(line.split(None, 1) for line in out.splitlines() if line.startswith("  "))
    assert facts["excite"] == __version__
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == metadata.version("torch")
    assert facts["numpy"] == numpy.__version__
    assert f"{torch.get_num_threads()} threads" in facts["cpu"]
    assert {"lightning", "ray", "wandb"} <= facts.keys()
    assert all(facts[name] == f"not downloaded: excite data fetch {name}" for name in SOURCES)
    assert ("no problems found" in out) == (not problems)


@needs_package
def test_missing_and_old_packages_are_problems(excite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"numpy": "1.20", "pandas": None, "ray": "1.0", "wandb": None}
    known = diagnosis._version
    monkeypatch.setattr(diagnosis, "_version", lambda name: found.get(name, "9999") if name in found else known(name))
    status, out, _ = excite("doctor")
    assert status == 1
    problems = "\n".join(line for line in out.splitlines() if line.startswith("problem: "))
    assert "numpy>=1.26 is required, 1.20 is installed: pip install" in problems
    assert "pandas>=2.2 is required, pandas is not installed" in problems
    assert "excite[ray] requires ray>=2.40, 1.0 is installed" in problems
    assert "wandb" not in problems  # an extra that is not wanted
    assert "pip install 'excite[wandb]'" in out


def test_a_driver_without_a_gpu_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert any("finds no GPU: install a torch" in problem for problem in diagnosis.diagnose().problems)


def test_damaged_data_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    source = SOURCES["mnist"]
    path = tmp_path / "data" / source.folder / source.archives[0].files[0].name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half of it")
    assert any(
        "mnist in" in problem and "excite data fetch mnist" in problem for problem in diagnosis.diagnose().problems
    )


def test_excite_that_is_not_installed_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert diagnosis.diagnose().problems[0].startswith("excite is not installed as a package")
