"""Training loops: one network, from a loss to a run; and gradient flow and descent that follow theory to the letter."""

from excite.fit.accuracy import accuracy
from excite.fit.architectures import ARCHITECTURES, build
from excite.fit.course import Course
from excite.fit.descending import descent
from excite.fit.factories import import_factory, make_model
from excite.fit.flow import gradient_flow
from excite.fit.loop import Fitted, fit
from excite.fit.losses import squared_error

__all__ = [
    "ARCHITECTURES",
    "Course",
    "Fitted",
    "accuracy",
    "build",
    "descent",
    "fit",
    "gradient_flow",
    "import_factory",
    "make_model",
    "squared_error",
]
