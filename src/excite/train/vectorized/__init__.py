"""Many networks trained in one vectorized step."""
