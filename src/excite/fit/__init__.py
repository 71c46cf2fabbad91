"""Training loops: one network, from a loss to a run; many small ones at once."""

from excite.fit.accuracy import accuracy
from excite.fit.architectures import ARCHITECTURES, build
from excite.fit.ensembles import Ensemble, ensemble
from excite.fit.factories import import_factory, make_model
from excite.fit.loop import Fitted, fit
from excite.fit.losses import squared_error
from excite.fit.trajectories import BiasTrajectory

__all__ = [
    "ARCHITECTURES",
    "BiasTrajectory",
    "Ensemble",
    "Fitted",
    "accuracy",
    "build",
    "ensemble",
    "fit",
    "import_factory",
    "make_model",
    "squared_error",
]
