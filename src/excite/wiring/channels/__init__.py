"""Follow the channels of a model through its exported graph: which numbers scale together, and what stops them."""

from excite.wiring.channels.following import follow

__all__ = ["follow"]
