"""Training loops: one network, from a loss to a run; many small ones at once; one on many processes; gradient flow and descent to the letter."""

from excite.fit.accuracy import accuracy
from excite.fit.architectures import ARCHITECTURES, build
from excite.fit.course import Course
from excite.fit.descending import descent
from excite.fit.dropout import train_with_dropout
from excite.fit.ensembles import Ensemble, ensemble
from excite.fit.factories import import_factory, make_model
from excite.fit.flow import gradient_flow
from excite.fit.loop import Fitted, fit
from excite.fit.losses import squared_error
from excite.fit.processes import Processes, many_processes
from excite.fit.trajectories import BiasTrajectory

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
