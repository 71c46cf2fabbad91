"""Margins: how far points are from the decision boundary, found by search and certified from below."""

from excite.margin.certificates.smoothing import SmoothedMargins, smoothed_margins
from excite.margin.evidence import Evidence
from excite.margin.fixed_radius import RobustAccuracy
from excite.margin.gap import Gap
from excite.margin.inputs import SearchOptions
from excite.margin.loaders import loader_margins
from excite.margin.measure import margins
from excite.margin.normalize import Unit
from excite.margin.result import Margins

__all__ = [
    "Evidence",
    "Gap",
    "Margins",
    "RobustAccuracy",
    "SearchOptions",
    "SmoothedMargins",
    "Unit",
    "loader_margins",
    "margins",
    "smoothed_margins",
]
