"""Adversarial training of the input, hidden layers and weights.

`training` has the class that users see; `ascent` searches the perturbations, `hidden_radius` says how far each hidden layer may
be perturbed, `weight_perturbation` perturbs the weights, `objective` has the errors that the search increases.
"""

from excite.excitation.adversarial.training import AdversarialTraining

__all__ = ["AdversarialTraining"]
