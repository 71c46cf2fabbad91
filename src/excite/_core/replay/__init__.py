"""A clean pass that records random numbers and batch statistics, and perturbed passes of the doubled batch that repeat them."""
