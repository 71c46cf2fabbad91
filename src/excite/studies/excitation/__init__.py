"""Studies of *Persistency of excitation for robustness of neural networks*."""
