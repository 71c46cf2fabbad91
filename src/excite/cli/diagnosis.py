"""Output of `excite doctor`: versions, devices, extras and datasets on this machine, and problems with them."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from excite._version import __version__
from excite.data.fetching import cache_folder, is_right
from excite.data.sources import SOURCES
from excite.errors import one_line


@dataclass
class Diagnosis:
    """Result of `diagnose`; `print` shows it.

    Args:
        sections: Facts by section, each a pair of name and value.
        problems: What does not work, each with what to do about it.
    """

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, section: str, name: str, value: object) -> None:
        """Adds a fact to a section."""
        self.sections.setdefault(section, []).append((name, str(value)))

    def __str__(self) -> str:
        width = max((len(name) for facts in self.sections.values() for name, _ in facts), default=0)
        lines = []
        for section, facts in self.sections.items():
            lines += [section, *(f"  {name.ljust(width)}  {value}" for name, value in facts), ""]
        lines += [f"problem: {problem}" for problem in self.problems] or ["no problems found"]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Examines this machine and this Python; downloads and writes nothing.

    Returns:
        Versions, devices, extras and datasets, and the problems with them.
    """
    diagnosis = Diagnosis()
    diagnosis.add("versions", "excite", __version__)
    diagnosis.add("versions", "python", platform.python_version())
    diagnosis.add("versions", "system", f"{platform.system()} {platform.machine()}")
    diagnosis.add("versions", "sqlite", sqlite3.sqlite_version)
    _check_packages(diagnosis)
    _check_devices(diagnosis)
    _check_data(diagnosis)
    return diagnosis


def requirements() -> dict[str, list[Requirement]]:
    """Requirements of the installed package by extra, "" for those without one; the extra "test" is left out."""
    by_extra: dict[str, list[Requirement]] = {"": []}
    for text in metadata.requires("excite") or ():
        requirement = Requirement(text)
        extra = next(iter(_extras_of(requirement)), "")
        if extra != "test":
            by_extra.setdefault(extra, []).append(requirement)
    return by_extra


def _extras_of(requirement: Requirement) -> Iterator[str]:
    for extra in metadata.metadata("excite").get_all("Provides-Extra") or ():
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            yield extra


def _check_packages(diagnosis: Diagnosis) -> None:
    try:
        by_extra = requirements()
    except metadata.PackageNotFoundError:
        diagnosis.problems.append(
            "excite is not installed as a package: pip install excite (its requirements are not checked)"
        )
        return
    for requirement in by_extra.pop(""):
        version = _version(requirement.name)
        diagnosis.add("versions", requirement.name, version or "not installed")
        if version is None or not _satisfies(requirement, version):
            diagnosis.problems.append(
                f"{requirement} is required, {_installed(requirement, version)}: pip install '{requirement}'"
            )
    for extra, needed in by_extra.items():
        _check_extra(diagnosis, extra, {requirement: _version(requirement.name) for requirement in needed})


def _check_extra(diagnosis: Diagnosis, extra: str, versions: dict[Requirement, str | None]) -> None:
    packages = ", ".join(
        f"{requirement.name} {version or 'not installed'}" for requirement, version in versions.items()
    )
    is_complete = all(version is not None for version in versions.values())
    diagnosis.add("extras", extra, packages if is_complete else f"{packages}: pip install 'excite[{extra}]'")
    for requirement, version in versions.items():
        if version is not None and not _satisfies(requirement, version):
            diagnosis.problems.append(
                f"excite[{extra}] requires {requirement.name}{requirement.specifier}, "
                f"{_installed(requirement, version)}: pip install 'excite[{extra}]'"
            )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True  # a local build


def _installed(requirement: Requirement, version: str | None) -> str:
    return f"{requirement.name} is not installed" if version is None else f"{version} is installed"


def _check_devices(diagnosis: Diagnosis) -> None:
    import torch

    diagnosis.add("devices", "cpu", f"{os.cpu_count()} processors, {torch.get_num_threads()} threads")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if not torch.cuda.is_available():
        diagnosis.add("devices", "cuda", f"not available (torch was built with {build})")
        if shutil.which("nvidia-smi"):
            diagnosis.problems.append(
                f"an NVIDIA driver is installed, but torch, built with {build}, finds no GPU: install a torch that matches the driver"
            )
        return
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"
        try:
            memory = torch.cuda.get_device_properties(number).total_memory / 2**30
            diagnosis.add("devices", name, f"{torch.cuda.get_device_name(number)}, {memory:.0f} GiB ({build})")
            torch.ones(2, device=name).sum().item()
        except RuntimeError as error:
            diagnosis.problems.append(f"{name} does not work: {one_line(error)[:160]}")


def _check_data(diagnosis: Diagnosis) -> None:
    root = cache_folder()
    diagnosis.add("data", "folder", f"{root} (set EXCITE_DATA to use another)")
    for name, source in SOURCES.items():
        files = [(root / source.folder / file.name, file) for archive in source.archives for file in archive.files]
        if not any(path.exists() for path, _ in files):
            diagnosis.add("data", name, f"not downloaded: excite data fetch {name}")
        elif all(is_right(path, file) for path, file in files):
            diagnosis.add("data", name, "downloaded and verified")
        else:
            diagnosis.add("data", name, "incomplete or damaged")
            diagnosis.problems.append(f"{name} in {root} is incomplete or damaged: excite data fetch {name}")
