"""Built-in models, and models by name."""
