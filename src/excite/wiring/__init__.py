"""What a model is made of: its affine layers in order of execution, how they connect, and which channels scale together."""

from excite.wiring.groups import Group, Site
from excite.wiring.layers import Layer
from excite.wiring.tracing import Wiring, trace

__all__ = ["Group", "Layer", "Site", "Wiring", "trace"]
