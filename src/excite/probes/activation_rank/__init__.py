"""Rank and richness of hidden activations, and which units they excite."""
