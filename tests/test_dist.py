"""What `make dist` builds: a wheel with everything the package reads, a small source archive without tests and data."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    subprocess.run([sys.executable, "-m", "hatchling", "build"], cwd=folder, check=True, capture_output=True)
    return folder / "dist"


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name and ".egg-info" not in name}
    assert wanted - names == set()
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_source_archive_is_small(built):
    archive = next(built.glob("*.tar.gz"))
    assert archive.stat().st_size < 2_000_000
    with tarfile.open(archive) as found:
        tops = {name.split("/")[1] for name in found.getnames() if "/" in name}
    assert {"src", "README.md", "LICENSE", "pyproject.toml"} <= tops
    assert not tops & {"tests", "docs", "runs", "benchmarks"}


def test_the_live_page_is_part_of_the_plain_install():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = " ".join(project["dependencies"])
    assert "starlette" in plain
    assert "uvicorn" in plain
    assert project["optional-dependencies"]["serve"] == []  # commands that name the extra still work
