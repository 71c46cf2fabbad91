"""Excite: see how robust and how complex a network becomes while it trains, and train it to be robust.

The few names a user needs, and the packages with the others: `excite.probes`, `excite.bounds`, and so on. Both are loaded when
first used, so that `import excite` is quick and works where only torch, numpy and scipy are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from excite._core import compatibility
from excite._version import __version__
from excite.errors import DataError, ExciteError, InputError, ModelError, RunError, TrainingStopped

if TYPE_CHECKING:
    from excite import (
        bounds,
        data,
        excitation,
        integrations,
        jobs,
        lipschitz,
        margin,
        monitor,
        probes,
        report,
        runs,
        studies,
        train,
        wiring,
    )
    from excite.excitation import AdversarialTraining, Hierarchy, PersistentExcitation, Relative, Stages
    from excite.margin import Margins, margins
    from excite.margin.fixed_radius import robust_accuracy
    from excite.monitor.watch import Watch, watch
    from excite.report.audit import audit
    from excite.runs import Run, load_run
    from excite.wiring import Wiring, trace

_WHERE = {
    "trace": "excite.wiring", "Wiring": "excite.wiring",
    "PersistentExcitation": "excite.excitation", "Relative": "excite.excitation", "Stages": "excite.excitation",
    "AdversarialTraining": "excite.excitation", "Hierarchy": "excite.excitation",
    "watch": "excite.monitor.watch", "Watch": "excite.monitor.watch",
    "load_run": "excite.runs", "Run": "excite.runs",
    "margins": "excite.margin", "Margins": "excite.margin",
    "robust_accuracy": "excite.margin.fixed_radius", "audit": "excite.report.audit",
}  # fmt: skip
_PACKAGES = {
    "bounds", "data", "excitation", "integrations", "jobs", "lipschitz", "margin", "monitor", "probes", "report", "runs",
    "studies", "train", "wiring",
}  # fmt: skip

compatibility.install()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"excite.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'excite' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_PACKAGES})


__all__ = [
    "AdversarialTraining",
    "DataError",
    "ExciteError",
    "Hierarchy",
    "InputError",
    "Margins",
    "ModelError",
    "PersistentExcitation",
    "Relative",
    "Run",
    "RunError",
    "Stages",
    "TrainingStopped",
    "Watch",
    "Wiring",
    "__version__",
    "audit",
    "bounds",
    "data",
    "excitation",
    "integrations",
    "jobs",
    "lipschitz",
    "load_run",
    "margin",
    "margins",
    "monitor",
    "probes",
    "report",
    "robust_accuracy",
    "runs",
    "studies",
    "trace",
    "train",
    "watch",
    "wiring",
]
