"""Gradient flow, gradient descent and SGD with a record of every step, for the theorems about training."""
