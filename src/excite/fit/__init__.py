"""Training loops: one network, from a loss to a run."""

from excite.fit.accuracy import accuracy
from excite.fit.architectures import ARCHITECTURES, build
from excite.fit.dropout import train_with_dropout
from excite.fit.factories import import_factory, make_model
from excite.fit.loop import Fitted, fit
from excite.fit.losses import squared_error

__all__ = [
    "ARCHITECTURES",
    "Fitted",
    "accuracy",
    "build",
    "fit",
    "import_factory",
    "make_model",
    "squared_error",
    "train_with_dropout",
]
