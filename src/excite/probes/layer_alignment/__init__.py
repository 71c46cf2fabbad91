"""Rank of weights and alignment of neighbouring layers."""
