"""Training loops: one network, from a loss to a run; many small ones at once; one on many processes; gradient flow and descent to the letter."""

from excite.train.distributed.processes import Processes, many_processes
from excite.train.dynamics.descent import descent
from excite.train.dynamics.dropout import train_with_dropout
from excite.train.dynamics.flow import gradient_flow
from excite.train.dynamics.objective import Course
from excite.train.dynamics.trajectories import BiasTrajectory
from excite.train.losses import squared_error
from excite.train.models.architectures import ARCHITECTURES, build
from excite.train.models.factories import import_factory, make_model
from excite.train.predictions import accuracy
from excite.train.trainer import Fitted, fit
from excite.train.vectorized.ensembles import Ensemble, ensemble

__all__ = [
    "ARCHITECTURES",
    "BiasTrajectory",
    "Course",
    "Ensemble",
    "Fitted",
    "Processes",
    "accuracy",
    "build",
    "descent",
    "ensemble",
    "fit",
    "gradient_flow",
    "import_factory",
    "make_model",
    "many_processes",
    "squared_error",
    "train_with_dropout",
]
