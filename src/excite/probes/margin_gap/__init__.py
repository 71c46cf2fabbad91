"""Margins of training and test points while a network trains, and the gap between them."""

from excite.probes.margin_gap.probe import PARTS, MarginGap

__all__ = ["PARTS", "MarginGap"]
