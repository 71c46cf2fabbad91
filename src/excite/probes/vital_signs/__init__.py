"""Vital signs of transformers, one probe each: attention, residual stream, updates, outputs."""

from excite.probes.vital_signs.defaults import vital_signs

__all__ = ["vital_signs"]
