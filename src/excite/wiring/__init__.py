"""What a model is made of: its affine layers in order of execution, how they connect, and which channels scale together."""

from excite.wiring.cutting import Cut, cuts
from excite.wiring.groups import Group, Site
from excite.wiring.layers import Layer
from excite.wiring.tracing import Wiring, trace

__all__ = ["Cut", "Group", "Layer", "Site", "Wiring", "cuts", "trace"]
