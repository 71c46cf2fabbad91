"""Theorems of *Richness of training data does not suffice*."""
