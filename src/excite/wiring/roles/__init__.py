"""Roles of the weights of a transformer: queries, keys, values and outputs of each attention, head by head."""

from excite.wiring.roles.attention import Attention, Projection

__all__ = ["Attention", "Projection"]
