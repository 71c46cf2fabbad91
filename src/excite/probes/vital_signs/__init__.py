"""Vital signs of transformers, one probe each: attention, residual stream, updates, outputs."""
