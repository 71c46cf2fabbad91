"""What `excite doctor` prints: versions, devices, extras and data on this machine, and what does not fit together."""

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
    """Facts by section, each a pair of name and value; `problems` are what does not fit, each with what to do."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, section: str, name: str, value: object) -> None:
        self.sections.setdefault(section, []).append((name, str(value)))

    def __str__(self) -> str:
        width = max((len(name) for facts in self.sections.values() for name, _ in facts), default=0)
        lines = []
        for section, facts in self.sections.items():
            lines += [section, *(f"  {name.ljust(width)}  {value}" for name, value in facts), ""]
        lines += [f"does not fit: {problem}" for problem in self.problems] or ["everything fits"]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this machine and this Python. Nothing is downloaded or written."""
    found = Diagnosis()
    found.add("versions", "excite", __version__)
    found.add("versions", "python", platform.python_version())
    found.add("versions", "system", f"{platform.system()} {platform.machine()}")
    found.add("versions", "sqlite", sqlite3.sqlite_version)
    _packages(found)
    _devices(found)
    _data(found)
    try:
        import fcntl  # noqa: F401
    except ImportError:
        found.add("versions", "locks", "not on this system: nothing keeps two processes from writing to one run")
    return found


def requirements() -> dict[str, list[Requirement]]:
    """What Excite needs by extra; "" for what it always needs. As the installed package says; tests are left out."""
    found: dict[str, list[Requirement]] = {"": []}
    for text in metadata.requires("excite") or ():
        needed = Requirement(text)
        extra = next(iter(_extras_of(needed)), "")
        if extra != "test":
            found.setdefault(extra, []).append(needed)
    return found


def _extras_of(needed: Requirement) -> Iterator[str]:
    for extra in metadata.metadata("excite").get_all("Provides-Extra") or ():
        if needed.marker is not None and needed.marker.evaluate({"extra": extra}):
            yield extra


def _packages(found: Diagnosis) -> None:
    try:
        known = requirements()
    except metadata.PackageNotFoundError:
        found.problems.append("excite is not installed as a package: pip install excite (what it needs is not checked)")
        return
    for needed in known.pop(""):
        version = _version(needed.name)
        found.add("versions", needed.name, version or "not installed")
        if version is None or not _fits(needed, version):
            found.problems.append(f"{needed} is needed, {_there(needed, version)}: pip install '{needed}'")
    for extra, all_needed in known.items():
        versions = {needed: _version(needed.name) for needed in all_needed}
        there = all(version is not None for version in versions.values())
        named = ", ".join(f"{needed.name} {version or 'not installed'}" for needed, version in versions.items())
        found.add("extras", extra, named if there else f"{named}: pip install 'excite[{extra}]'")
        for needed, version in versions.items():
            if version is not None and not _fits(needed, version):
                wanted = f"{needed.name}{needed.specifier}"
                found.problems.append(
                    f"excite[{extra}] needs {wanted}, {_there(needed, version)}: pip install 'excite[{extra}]'"
                )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(needed: Requirement, version: str) -> bool:
    try:
        return needed.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return True  # of somebody's own making


def _there(needed: Requirement, version: str | None) -> str:
    return f"{needed.name} is not installed" if version is None else f"{version} is installed"


def _devices(found: Diagnosis) -> None:
    import torch

    found.add("devices", "cpu", f"{os.cpu_count()} processors, {torch.get_num_threads()} threads")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if not torch.cuda.is_available():
        found.add("devices", "cuda", f"none (torch was built with {built})")
        if shutil.which("nvidia-smi"):
            found.problems.append(
                f"a driver for NVIDIA GPUs is installed, but torch, built with {built}, finds none: install a torch that fits the driver"
            )
        return
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"
        try:
            memory = torch.cuda.get_device_properties(number).total_memory / 2**30
            found.add("devices", name, f"{torch.cuda.get_device_name(number)}, {memory:.0f} GiB ({built})")
            torch.ones(2, device=name).sum().item()
        except RuntimeError as error:
            found.problems.append(f"{name} does not compute: {one_line(error)[:160]}")


def _data(found: Diagnosis) -> None:
    root = cache_folder()
    found.add("data", "folder", f"{root} (EXCITE_DATA names another)")
    for name, source in SOURCES.items():
        files = [(root / source.folder / file.name, file) for archive in source.archives for file in archive.files]
        if not any(path.exists() for path, _ in files):
            found.add("data", name, f"not here: excite data fetch {name}")
        elif all(is_right(path, file) for path, file in files):
            found.add("data", name, "here, and verified")
        else:
            found.add("data", name, "incomplete or damaged")
            found.problems.append(f"{name} in {root} is incomplete or damaged: excite data fetch {name}")
