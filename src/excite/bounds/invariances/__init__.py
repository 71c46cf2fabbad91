"""Theorems of *Training invariances and the low-rank phenomenon*."""
