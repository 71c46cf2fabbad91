"""Intercept the affine calls of a model while it runs, and account for every parameter."""
