"""The structure of a model: its affine layers in order of execution, how they connect, and which channels scale together."""

from excite.wiring.cuts import Cut, cuts
from excite.wiring.decomposition import Decomposition, decompose
from excite.wiring.groups import Group, Site
from excite.wiring.layers import Layer
from excite.wiring.path_counts import PathCount, path_count
from excite.wiring.paths import Graph, fully_connected
from excite.wiring.piecewise import PiecewiseLinear, piecewise_linear
from excite.wiring.roles import Attention, Projection
from excite.wiring.tracing import Wiring, trace
from excite.wiring.translations import Translation

__all__ = [
    "Attention",
    "Cut",
    "Decomposition",
    "Graph",
    "Group",
    "Layer",
    "PathCount",
    "PiecewiseLinear",
    "Projection",
    "Site",
    "Translation",
    "Wiring",
    "cuts",
    "decompose",
    "fully_connected",
    "path_count",
    "piecewise_linear",
    "trace",
]
