"""Whether a search can be relied on: planted adversarial examples, and gradients for models whose own mislead."""
