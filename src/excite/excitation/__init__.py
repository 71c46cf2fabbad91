"""Losses for robust training: persistent excitation (Algorithm 1) and adversarial training, with their perturbation sets and radii."""

from excite.excitation.adversarial import AdversarialTraining
from excite.excitation.adversarial.ascent import HiddenOptions
from excite.excitation.hierarchy import Hierarchy
from excite.excitation.loss import PersistentExcitation
from excite.excitation.radius import Relative, Stages

__all__ = ["AdversarialTraining", "HiddenOptions", "Hierarchy", "PersistentExcitation", "Relative", "Stages"]
