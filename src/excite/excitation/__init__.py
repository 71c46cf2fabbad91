"""Persistent excitation: perturbation sets, the extremes of the output over a set, and the loss of Algorithm 1."""

from excite.excitation.adversarial import AdversarialTraining
from excite.excitation.adversarial.ascent import HiddenOptions
from excite.excitation.hierarchy import Hierarchy
from excite.excitation.loss import PersistentExcitation
from excite.excitation.radius import Relative, Stages

__all__ = ["AdversarialTraining", "HiddenOptions", "Hierarchy", "PersistentExcitation", "Relative", "Stages"]
