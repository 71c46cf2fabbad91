"""Training: from a config, from a loss, on several processes, many networks at once; gradient flow and gradient descent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from excite._core.compatibility import renamed_names
from excite.runs.import_paths import import_factory
from excite.train.distributed.processes import Processes, many_processes
from excite.train.dynamics.descent import descent
from excite.train.dynamics.dropout import train_with_dropout
from excite.train.dynamics.flow import gradient_flow
from excite.train.dynamics.objective import FlowResult
from excite.train.dynamics.trajectories import BiasTrajectory
from excite.train.fitting import fit
from excite.train.losses import squared_error
from excite.train.models.architectures import ARCHITECTURES, build
from excite.train.models.factories import make_model
from excite.train.momentum import zero_momentum
from excite.train.predictions import accuracy
from excite.train.settings import TrainingResult
from excite.train.vectorized.ensembles import Ensemble, ensemble

if TYPE_CHECKING:
    from excite.train.config import load_config
    from excite.train.from_config import load_trained, train, train_across, train_together

# Loaded when first used: configs need pydantic, which the training loops do without.
_LAZY = {
    "load_config": "excite.train.config",
    "load_trained": "excite.train.from_config",
    "train": "excite.train.from_config",
    "train_across": "excite.train.from_config",
    "train_together": "excite.train.from_config",
}
_renamed = renamed_names(__name__, {"Course": "FlowResult", "Fitted": "TrainingResult"})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        return _renamed(name)
    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "ARCHITECTURES",
    "BiasTrajectory",
    "Ensemble",
    "FlowResult",
    "Processes",
    "TrainingResult",
    "accuracy",
    "build",
    "descent",
    "ensemble",
    "fit",
    "gradient_flow",
    "import_factory",
    "load_config",
    "load_trained",
    "make_model",
    "many_processes",
    "squared_error",
    "train",
    "train_across",
    "train_together",
    "train_with_dropout",
    "zero_momentum",
]
