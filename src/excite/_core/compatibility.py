"""Names of earlier versions that still work, each with a DeprecationWarning that says what to write instead."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Import paths that were documented. Modules below a renamed package that are not listed are refused by name.
MODULES = {
    "excite.alerts": "excite.monitor.alerts",
    "excite.auditing": "excite.report.audit",
    "excite.config": "excite.train.config",
    "excite.engines": "excite.jobs.executors",
    "excite.fit": "excite.train",
    "excite.fit.captured": "excite.train.cuda_graph",
    "excite.integrations.sinks": "excite.monitor.sinks",
    "excite.robust": "excite.margin.fixed_radius",
    "excite.studies.regions_figure": "excite.studies.trajectory.regions",
    "excite.sweeping": "excite.jobs.sweep",
    "excite.training": "excite.train.from_config",
    "excite.watching": "excite.monitor.watch",
}


class RenamedModules(MetaPathFinder, Loader):
    """Imports a module under its earlier name: the same module object, not a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, self)
        package = fullname.rpartition(".")[0]
        if package in MODULES:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: {package} is now {MODULES[package]}, and its modules were renamed",
                name=fullname,
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MODULES[spec.name]
        warnings.warn(f"{spec.name} is deprecated: import {new} instead", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # the import system replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Makes earlier import paths work in this process."""
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedModules())  # before the file system: `excite.fit.X` must not be a second copy
