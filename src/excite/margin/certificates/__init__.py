"""Lower bounds on margins: no perturbation below them can change the decision."""
